# How checks in stages report; read by scripts that set `report` to a file and `failed` to 0.

# Runs a command of a stage, keeps what it prints, and notes how it went.
note() {
    what=$1
    shift
    start=$(date +%s)
    code=0
    timeout 580 "$@" >>"$report.log" 2>&1 || code=$?
    took=$(($(date +%s) - start))
    if [ $code = 0 ]; then
        echo "ok      ${took} s  $what" | tee -a "$report"
    else
        failed=1
        echo "FAILED  ${took} s  $what (exit $code)" | tee -a "$report"
    fi
}
