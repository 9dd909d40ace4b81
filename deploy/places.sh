# Where install.sh puts things and uninstall.sh takes them from; PREFIX is set by both.
home=$PREFIX/lib/ggufd
bin=$PREFIX/bin
share=$PREFIX/share/ggufd
units=$PREFIX/lib/systemd/system
sysusers=$PREFIX/lib/sysusers.d
tmpfiles=$PREFIX/lib/tmpfiles.d
