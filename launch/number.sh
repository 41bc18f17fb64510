# To be sourced by every script that takes a number from its user.
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"

# is_number VALUE LEAST [MOST]: whether VALUE is a decimal integer in that range. bash reads 08 as octal, evaluates text in
# an arithmetic expression, and wraps around at 2^63: so there are no leading zeros and at most seven digits.
is_number() {
    [[ $1 =~ ^(0|[1-9][0-9]{0,6})$ && $1 -ge $2 && $1 -le ${3:-9999999} ]]
}
