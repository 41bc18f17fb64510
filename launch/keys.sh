# To be sourced by what has to read log.dir and profile.kind as the ranks will.
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"

# read_keys ARGUMENT...: sets `folder` and `kind` to the last log.dir and profile.kind. Fails, with the argument in `unread`,
# for a form that only the ranks understand: a whole section, quotes, another user's home.
read_keys() {
    local argument
    folder=. kind=none
    for argument; do
        unread=$argument
        case $argument in
        log.dir=\~/*) folder=${HOME:-}/${argument#log.dir=\~/} ;;
        log=* | profile=* | log.dir=[\"\'~]* | profile.kind=[\"\']*) return 1 ;;
        log.dir=*) folder=${argument#*=} ;;
        profile.kind=*) kind=${argument#*=} ;;
        esac
    done
}
