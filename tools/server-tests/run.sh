#!/bin/sh
# All tests of the server from outside, against a binary; installs what they need into FOLDER (a few packages of PyPI and npm) and
# HAProxy by apt where it is not there. Python with venv and Node 20 have to be there.
#
#     tools/server-tests/run.sh PATH_OF_LILY FOLDER
set -eu
lily=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
cd "$(dirname "$0")"

command -v haproxy || { apt-get update && apt-get install --yes --no-install-recommends haproxy; }
test -x "$folder/venv/bin/python" || python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --requirement requirements.txt
# Node looks for packages beside the script.
cp clients.mjs clients.jsonl package.json "$folder"
npm install --silent --no-audit --no-fund --prefix "$folder"

export PYTHONDONTWRITEBYTECODE=1
python="$folder/venv/bin/python"
for test in clients load crash scaleout; do
    printf '\n-- %s.py\n' "$test"
    "$python" "$test.py" "$lily"
done
printf '\n-- clients.mjs\n'
node "$folder/clients.mjs" "$lily"
