#!/bin/sh
# One process of a run on this host: start.sh ROLE N. It is started again while its exit code says that the same may work.
umask 077
cd /shared/runs/digits-1 || exit 74
name=$1-$2
export PARAFT_INDEX="$2" PARAFT_SERVERS=n1:7071,n2:7072,n3:7073
echo $$ >"$name.pid"
rm -f "$name.code"
stopped= child= tries=0 code=143
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child"' TERM INT HUP
while [ -z "$stopped" ]; do
    case $1 in
    server) /opt/paraft/bin/paraft launch --role server --run-dir /shared/runs/digits-1 --grace 20 --until-done /shared/runs/digits-1/job.toml & ;;
    worker) /opt/paraft/bin/paraft launch --role worker --run-dir /shared/runs/digits-1 --grace 20 /shared/runs/digits-1/job.toml & ;;
    esac
    child=$!
    wait "$child"; code=$?
    # A signal to this script ends `wait` before the process has ended.
    while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
    child=
    case $code in
    69|74|129|1[3-9][0-9]) ;;  # no servers, no room, a signal: again
    *) break ;;                # done, or the same would fail again
    esac
    [ "$tries" -lt 10 ] || break
    tries=$((tries + 1))
    export PARAFT_ATTEMPT=$tries
    sleep 1
done
echo "$code" >"$name.code"
rm -f "$name.pid"
exit "$code"
