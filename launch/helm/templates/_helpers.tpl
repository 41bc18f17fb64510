{{/* Pods of the job: one a node. */}}
{{- define "minitron.nodes" -}}
{{- $gpus := int .Values.workload.gpus }}
{{- $perNode := int .Values.workload.gpusPerNode }}
{{- if and (gt $gpus $perNode) (mod $gpus $perNode) }}
{{- fail (printf "workload.gpus=%d is more than a node's workload.gpusPerNode=%d and no multiple of it; use for example %d" $gpus $perNode (mul $perNode (add1 (div $gpus $perNode)))) }}
{{- end }}
{{- max 1 (div $gpus $perNode) }}
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
{{- $_ := set $env .name (toString .value) }}
{{- end }}
{{- end }}
{{- toYaml $env }}
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
{{- else if .volume }}
{{- toYaml .volume }}
{{- else }}
{{- fail "nowhere to keep the artifacts; set workload.gcsBucketForDataCataPath=BUCKET, or workload.volume" }}
{{- end }}
{{- end }}
