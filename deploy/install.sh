#!/bin/sh
# Installs ggufd for systemd from this source tree: a virtual environment, the command, the units.
# usage: deploy/install.sh [--units-only]
# Environment: PREFIX (/usr/local), SYSCONFDIR (/etc), DESTDIR (stage below it, run nothing),
#   PYTHON (python3, 3.11 or newer), LOCK (cuda where there is an NVIDIA device, else runtime),
#   NOTIFY_RELOAD (yes | no; by the version of the running systemd)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
PREFIX=${PREFIX:-/usr/local} SYSCONFDIR=${SYSCONFDIR:-/etc} DESTDIR=${DESTDIR:-} PYTHON=${PYTHON:-python3}
. "$here/places.sh"

if [ "${1:-}" != --units-only ]; then
  if [ -z "${LOCK:-}" ]; then if [ -e /dev/nvidiactl ]; then LOCK=cuda; else LOCK=runtime; fi; fi
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$PYTHON is older than 3.11" >&2; exit 1; }
  rm -rf "$DESTDIR$home"
  "$PYTHON" -m venv "$DESTDIR$home"
  pip="$DESTDIR$home/bin/python -m pip --disable-pip-version-check -q install"
  $pip --require-hashes -r "$here/../requirements/$LOCK.txt"
  $pip --no-deps "$here/.."
  install -d "$DESTDIR$bin"
  # -I: nothing of the caller's environment or directory changes what is imported
  printf '#!/bin/sh\nexec %s/bin/python -I -X faulthandler -m streamer "$@"\n' "$home" >"$DESTDIR$bin/ggufd"
  chmod 755 "$DESTDIR$bin/ggufd"
fi

install -d "$DESTDIR$units" "$DESTDIR$sysusers" "$DESTDIR$tmpfiles" "$DESTDIR$SYSCONFDIR/ggufd" "$DESTDIR$share"
sed "s|@BINDIR@|$bin|" "$here/systemd/ggufd@.service" >"$DESTDIR$units/ggufd@.service"
install -m 644 "$here/systemd/ggufd@.socket" "$here/systemd/ggufd-nvidia.service" "$DESTDIR$units/"
install -m 644 "$here/systemd/ggufd.sysusers" "$DESTDIR$sysusers/ggufd.conf"
install -m 644 "$here/systemd/ggufd.tmpfiles" "$DESTDIR$tmpfiles/ggufd.conf"
install -m 644 "$here/example.toml" "$here/systemd/tcp.conf" "$DESTDIR$share/"
chmod 644 "$DESTDIR$units/ggufd@.service"

version=$(systemctl --version 2>/dev/null | sed -n '1s/^systemd \([0-9]*\).*/\1/p')
if [ -z "${NOTIFY_RELOAD:-}" ]; then if [ "${version:-0}" -ge 253 ]; then NOTIFY_RELOAD=yes; else NOTIFY_RELOAD=no; fi; fi
rm -rf "$DESTDIR$units/ggufd@.service.d"
if [ "$NOTIFY_RELOAD" = yes ]; then
  install -D -m 644 "$here/systemd/notify-reload.conf" "$DESTDIR$units/ggufd@.service.d/notify-reload.conf"
fi

if [ -z "$DESTDIR" ] && [ -d /run/systemd/system ]; then
  systemd-sysusers "$sysusers/ggufd.conf"
  systemd-tmpfiles --create "$tmpfiles/ggufd.conf"
  systemctl daemon-reload
fi
echo "installed. Next: copy $share/example.toml to $SYSCONFDIR/ggufd/NAME.toml, then systemctl enable --now ggufd@NAME"
