#!/bin/sh
# Stops every ggufd unit and removes what install.sh has put there. Configurations, models, caches and the group stay.
# usage: deploy/uninstall.sh    Environment: PREFIX (/usr/local), DESTDIR
set -eu
here=$(cd "$(dirname "$0")" && pwd)
PREFIX=${PREFIX:-/usr/local} DESTDIR=${DESTDIR:-}
. "$here/places.sh"

if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then
  instances=$(systemctl list-units --all --plain --no-legend 'ggufd@*' | cut -d' ' -f1)
  enabled=$(systemctl list-unit-files --plain --no-legend --state=enabled 'ggufd@*' | cut -d' ' -f1)
  [ -z "$instances" ] || systemctl stop $instances || true # together: a socket must not start its service anew
  [ -z "$instances$enabled" ] || systemctl disable -q $instances $enabled 2>/dev/null || true
fi
rm -f "$DESTDIR$units/ggufd@.service" "$DESTDIR$units/ggufd@.socket" "$DESTDIR$units/ggufd-nvidia.service" \
  "$DESTDIR$sysusers/ggufd.conf" "$DESTDIR$tmpfiles/ggufd.conf" "$DESTDIR$bin/ggufd"
rm -rf "$DESTDIR$units/ggufd@.service.d" "$DESTDIR$home" "$DESTDIR$share"
if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
echo "removed. Kept: /etc/ggufd, /srv/ggufd, /var/lib/ggufd, /var/cache/ggufd, the group ggufd"
