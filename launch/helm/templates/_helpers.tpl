{{/* Pods of the job: one a node. */}}
{{- define "minitron.nodes" -}}
{{- $gpus := int .Values.workload.gpus }}
{{- $perNode := int .Values.workload.gpusPerNode }}
{{- if and (gt $gpus $perNode) (mod $gpus $perNode) }}
{{- fail (printf "workload.gpus=%d is more than a node's workload.gpusPerNode=%d and no multiple of it; use for example %d" $gpus $perNode (mul $perNode (add1 (div $gpus $perNode)))) }}
{{- end }}
{{- max 1 (div $gpus $perNode) }}
{{- end }}

{{/* A value as text. helm reads the integers of a values file as floats, and writes those from 1e6 on with an exponent. */}}
{{- define "minitron.text" -}}
{{- if kindIs "float64" . }}{{ int64 . }}{{ else }}{{ toString . }}{{ end }}
{{- end }}

{{/* Variables of the training container as a YAML mapping; the later one wins. */}}
{{- define "minitron.env" -}}
{{- $env := .Files.Get "files/env.yaml" | fromYaml }}
{{- with .Values.network }}
{{- if .interface }}
{{- $_ := set $env "NCCL_SOCKET_IFNAME" .interface }}
{{- $_ := set $env "GLOO_SOCKET_IFNAME" .interface }}
{{- end }}
{{- if eq .stack "tcpxo" }}
{{- $env = merge ($.Files.Get "files/env-tcpxo.yaml" | fromYaml) $env }}
{{- end }}
{{- range .ncclSettings }}
{{- $_ := set $env .name (include "minitron.text" .value) }}
{{- end }}
{{- end }}
{{- range .Values.workload.env }}
{{- $_ := unset $env .name }}
{{- end }}
{{- toYaml $env }}
{{- end }}

{{/* Refuses a key that minitron does not have, of config and of arguments: the pods would, one after another. A line of
keys.txt is a key, what it takes, and the names that other trainers have for it, as they end; the longest end counts. In
answers.yaml are those that no key stands for. A key of which at most two letters that follow each other differ was meant.
A value of another type is refused as well. In config that holds for texts alone: a number may have any form of YAML. */}}
{{- define "minitron.check" -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the release %q cannot name a Service; begin with a letter, and use lower-case letters, digits and -" .Release.Name) }}
{{- end }}
{{- if and (eq .Values.network.stack "tcpxo") (ne (int .Values.workload.gpusPerNode) 8) }}
{{- fail (printf "workload.gpusPerNode=%d, but network.stack=tcpxo is of machines with 8 GPUs; use 8, or network.stack=tcp" (int .Values.workload.gpusPerNode)) }}
{{- end }}
{{- include "minitron.complete" . }}
{{- include "minitron.machine" . }}
{{- $patterns := dict "null" "null|Null|NULL" "int" "[+-]?(0|[1-9](_?[0-9]){0,17})" "bool" "(?i:true|false|yes|no|on|off)" }}
{{- $_ := merge $patterns (dict "float" "[+-]?([0-9](_?[0-9])*(\\.[0-9]*)?|\\.[0-9]+)([eE][+-]?[0-9]+)?" "list" "\\[.*" "section" "\\{.*" "text" ".*\\S.*") }}
{{- $fixes := dict }}
{{- range $answer, $names := .Files.Get "files/answers.yaml" | fromYaml }}
{{- range splitList " " $names }}
{{- $_ := set $fixes . $answer }}
{{- end }}
{{- end }}
{{- $takes := dict }}
{{- range $line := .Files.Lines "files/keys.txt" }}
{{- if $line }}
{{- $words := splitList " " $line }}
{{- $_ := set $takes (first $words) (index $words 1) }}
{{- range concat (list (first $words)) (slice $words 2) }}
{{- $_ := set $fixes . (printf "use %s" (first $words)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $typed := list }}
{{- $given := list }}
{{- $config := fromYaml .Values.config }}
{{- with get $config "Error" }}
{{- fail (printf "config is no YAML of keys (%s); give the run's file: --set-file config=configs/gpt3_175b.yaml" (toString . | trunc 200)) }}
{{- end }}
{{- range $section, $values := $config }}
{{- if kindIs "map" $values }}
{{- range $key, $value := $values }}
{{- $typed = append $typed (printf "%s.%s" $section $key) }}
{{- if kindIs "string" $value }}
{{- $given = append $given (printf "%s.%s=%s" $section $key $value) }}
{{- end }}
{{- end }}
{{- else }}
{{- $typed = append $typed $section }}
{{- end }}
{{- end }}
{{- range .Values.workload.arguments }}
{{- $typed = append $typed (splitList "=" . | first) }}
{{- $given = append $given . }}
{{- end }}
{{- range $typed }}
{{- if not (hasKey $takes .) }}
{{- $shown := regexReplaceAll "[^ -~]" . "?" | trunc 200 }}
{{- $fix := include "minitron.meant" (dict "typed" (trunc 60 $shown) "keys" (keys $takes | sortAlpha)) }}
{{- $parts := splitList "." . }}
{{- range untilStep (min 3 (len $parts) | int) 0 -1 | reverse }}
{{- $fix = get $fixes (slice $parts (sub (len $parts) . | int) | join ".") | default $fix }}
{{- end }}
{{- fail (printf "unknown key %s in config or workload.arguments; %s" $shown $fix) }}
{{- end }}
{{- end }}
{{- range $given }}
{{- $key := splitList "=" . | first }}
{{- $value := trimPrefix (printf "%s=" $key) . }}
{{- $fits := false }}
{{- range splitList "|" (get $takes $key) }}
{{- $pattern := get $patterns . | default (printf "[\"']?%s[\"']?" .) }}
{{- $fits = or $fits (regexMatch (printf "(?s)^(%s)$" $pattern) $value) }}
{{- end }}
{{- if not $fits }}
{{- fail (printf "%s=%s in config or workload.arguments is not one of %s; correct the value" $key (regexReplaceAll "[^ -~]" $value "?" | trunc 200) (get $takes $key)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Names all that has to be set and is not. */}}
{{- define "minitron.complete" -}}
{{- $lacking := list }}
{{- if not .Values.config }}
{{- $lacking = append $lacking "config is empty; give the run's YAML: --set-file config=configs/gpt3_175b.yaml" }}
{{- end }}
{{- if not .Values.workload.image }}
{{- $lacking = append $lacking "workload.image is empty; name the image built from launch/Dockerfile" }}
{{- end }}
{{- if not (or .Values.workload.gcsBucketForDataCataPath .Values.workload.volume .Values.workload.gcsVolumeAttributes) }}
{{- $lacking = append $lacking "nowhere to keep the artifacts; set workload.gcsBucketForDataCataPath=BUCKET, or workload.volume" }}
{{- end }}
{{- with $lacking }}
{{- fail (join "; and " .) }}
{{- end }}
{{- end }}

{{/* Says which key was meant by what was typed. */}}
{{- define "minitron.meant" -}}
{{- $typed := .typed }}
{{- $near := list (printf "[a-z]+[.]%s" (splitList "." $typed | last | regexQuoteMeta)) }}
{{- range $i := until (len $typed) }}
{{- $near = append $near (printf "%s.{0,3}%s" (substr 0 $i $typed | regexQuoteMeta) (substr (add $i 2 | min (len $typed) | int) -1 $typed | regexQuoteMeta)) }}
{{- end }}
{{- $meant := list }}
{{- range .keys }}
{{- if regexMatch (printf "^(%s)$" (join "|" $near)) . }}
{{- $meant = append $meant . }}
{{- end }}
{{- end }}
{{- if $meant }}did you mean {{ join " or " $meant }}?{{ else }}python -m minitron.pretrain --help lists the keys{{ end }}
{{- end }}

{{/* Refuses a workload.gpusPerNode that the machines of nodeSelector do not have, where its labels tell how many they have. */}}
{{- define "minitron.machine" -}}
{{- $perNode := int .Values.workload.gpusPerNode }}
{{- range $label, $value := .Values.nodeSelector }}
{{- $gpus := 0 }}
{{- if has $label (list "nvidia.com/gpu.count" "cloud.google.com/gke-accelerator-count") }}
{{- $gpus = int $value }}
{{- else if eq $label "node.kubernetes.io/instance-type" }}
{{- range $machine, $count := $.Files.Get "files/machines.yaml" | fromYaml }}
{{- if regexMatch (printf "^(%s)$" $machine) (toString $value) }}
{{- $gpus = int $count }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $gpus (ne $gpus $perNode) }}
{{- fail (printf "workload.gpusPerNode=%d, but the nodes of nodeSelector %s=%s have %d GPUs; use workload.gpusPerNode=%d" $perNode $label (toString $value) $gpus $gpus) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the ranks run: fine-tuning if finetune.kind is set, in config or by the last argument that says so. */}}
{{- define "minitron.module" -}}
{{- $finetune := get (fromYaml .Values.config) "finetune" | default dict }}
{{- $kind := get $finetune "kind" | default "null" }}
{{- range .Values.workload.arguments }}
{{- if hasPrefix "finetune.kind=" . }}
{{- $kind = trimPrefix "finetune.kind=" . }}
{{- end }}
{{- end }}
{{- if eq $kind "null" }}minitron.pretrain{{ else }}minitron.finetune{{ end }}
{{- end }}

{{/* The volume that keeps the artifacts. */}}
{{- define "minitron.artifacts" -}}
{{- if and .gcsBucketForDataCataPath .volume }}
{{- fail "workload.gcsBucketForDataCataPath and workload.volume are both set; the artifacts go to one of them" }}
{{- else if .gcsBucketForDataCataPath }}
csi:
  driver: gcsfuse.csi.storage.gke.io
  volumeAttributes: {{/* Pods on the host's network authenticate as their service account only if they ask for it. */}}
    {{- $own := dict "bucketName" .gcsBucketForDataCataPath "hostNetworkPodKSA" "true" }}
    {{- merge .gcsVolumeAttributes $own | toYaml | nindent 4 }}
{{- else if .gcsVolumeAttributes }}
{{- fail "workload.gcsVolumeAttributes is set without a bucket; set workload.gcsBucketForDataCataPath, too" }}
{{- else }}
{{- toYaml .volume }}
{{- end }}
{{- end }}
