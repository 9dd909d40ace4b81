#!/bin/bash
# Becomes systemd, PID 1 of the namespaces it was started in, over an overlay of this machine's root.
# usage: box_init.sh FOLDER [SOURCE TARGET]...   each SOURCE is seen read-only at TARGET in the box
# Everything it writes lies in a tmpfs of its own mount namespace and ends with it.
set -eu
folder=$1; shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$folder"
mkdir -p "$folder"/{upper,work,root}
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$folder/root"
root=$folder/root
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount --rbind /dev "$root/dev"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
while [ $# -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p "$root$2"; else mkdir -p "$root$(dirname "$2")"; : >"$root$2"; fi
  mount --bind "$1" "$root$2"
  mount -o remount,bind,ro "$root$2"
  shift 2
done
# A machine's own services are none of the box's: only what a test starts runs there.
rm -rf "$root"/etc/systemd/system/*.wants "$root"/etc/systemd/system/ggufd* "$root"/etc/ggufd
rm -rf "$root"/var/log/journal "$root"/usr/local/lib/systemd
# Shared among the box's own namespaces, as systemd has it on a machine: credentials are mounted from a helper's.
mount --make-rshared "$root"
exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=other \
  /lib/systemd/systemd --system --unit=basic.target --log-target=journal --show-status=0
