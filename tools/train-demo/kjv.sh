#!/bin/sh
# The King James Version as plain verses, one a line, from Debian's packages: sh kjv.sh OUT.txt
set -e
out=$(realpath "$1")
dir=$(mktemp -d)
cd "$dir"
apt-get download bible-kjv bible-kjv-text
for package in *.deb; do dpkg -x "$package" .; done
./usr/bin/bible -l100000 -p usr/lib gen1:1-rev22:21 | sed -n 's/^ *[0-9][0-9]* //p' >"$out"
wc "$out"
