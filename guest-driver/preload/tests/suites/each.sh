# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# Runs programs that are a test each: each.sh JOBS SECONDS PROGRAM... -- FILE...
# Writes "ok", "failed" or "timeout" and the file's name into $RESULTS.
jobs=$1 limit=$2 program=()
shift 2
while [ "$1" != -- ]; do
    program+=("$1")
    shift
done
shift
export limit
one() {
    local status=0 file=${*: -1}
    timeout --kill-after=5 "$limit" "$@" </dev/null >"$scratch/each.$$" 2>&1 || status=$?
    case $status in
    0) result=ok ;;
    124 | 137) result=timeout ;;
    *) result=failed ;;
    esac
    printf '%s\t%s\n' "$result" "${file##*/}" >>"$RESULTS"
    if [ $result != ok ]; then
        printf '\n== %s: %s\n' "$file" "$result"
        tail -c 3000 "$scratch/each.$$"
    fi
    rm -f "$scratch/each.$$"
}
export -f one
printf '%s\0' "$@" | xargs -0 -P "$jobs" -n 1 bash -c 'one "$@"' - "${program[@]}"
