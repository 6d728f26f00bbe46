#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The packages of `cargo xtask package` in a Debian without anything else: runs the commands of
# docs/operating.md as they stand there, and looks at what is installed and what is left at the end.
#
# The RPM packages have to have the same files. That they work on a system with RPM, nothing here shows.
#
# It works in a root directory, a mount and a network namespace of its own. It needs root, a C compiler,
# pkg-config, gdb, debhelper, dh-apparmor, dh-dkms, lintian, apparmor, rpm, rpmlint, openssh-client and
# mmdebstrap; a missing one fails where CI is true, and is said aloud elsewhere. The root directory is made once and kept in ~/.cache.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing() {
    echo "NOT TESTED: packages: $*" >&2
    [ "${CI:-false}" = true ] && exit 1
    exit 0
}
[ "$(id -u)" = 0 ] || missing "this is not root"
if [ "${1:-}" != inside ]; then
    for tool in mmdebstrap dh dh_apparmor dh_dkms lintian apparmor_parser rpmbuild rpmlint cc pkg-config gdb ssh-keygen; do
        command -v "$tool" >/dev/null && continue
        [ "${CI:-false}" = true ] || missing "there is no $tool"
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 install -y -q \
            --no-install-recommends mmdebstrap debhelper dh-apparmor dh-dkms lintian apparmor rpm rpmlint gcc \
            libc6-dev pkg-config gdb openssh-client
        break
    done
    echo "the AppArmor profile is one, for the path of the program, by the features of AppArmor 3.0"
    parser=(apparmor_parser --skip-kernel-load --skip-cache --features-file /etc/apparmor.d/abi/3.0)
    profile=packaging/apparmor-profile
    "${parser[@]}" --quiet --Werror "$profile"
    [ "$("${parser[@]}" --quiet --names "$profile")" = vhost-device-ism ]
    if sed 's/capability setuid,/capability setuids,/' "$profile" | "${parser[@]}" --quiet 2>/dev/null; then
        echo "FAILED: the parser takes a rule that is none" >&2
        exit 1
    fi
    # Debug symbols are compressed already.
    DPKG_DEB_COMPRESSOR_LEVEL=0 cargo xtask package --rpm
    packages=systemd-standalone-sysusers,systemd-standalone-tmpfiles,passwd
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/vhost-device-ism
    image=$cache/packages-$(echo "$packages" | sha256sum | head -c 12).tar
    if [ ! -e "$image" ]; then
        mkdir -p "$cache"
        mmdebstrap --quiet --variant=apt --include="$packages" \
            --aptopt='APT::Install-Recommends "false"' bookworm "$image.$$.tar"
        mv "$image.$$.tar" "$image"
    fi
    tests/packages/release.sh "$image"
    exec unshare --mount --net --pid --fork -- "$0" inside "$image" "${CARGO_TARGET_DIR:-target}/package"
fi
image=$2 packages=$3

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# A host of its own ----------------------------------------------------------------------------------

place=$(mktemp -d)
end() {
    umount --recursive --lazy "$place" 2>/dev/null || true
    rmdir "$place"
}
trap end EXIT
mount -t tmpfs -o mode=755 tmpfs "$place"
tar -C "$place" -xf "$image"
mount -t proc proc /proc
mount -t proc proc "$place/proc"
mount --rbind /dev "$place/dev"
ip link set lo up
echo '127.0.0.1 localhost' >"$place/etc/hosts"
# The tarball, which is for hosts without packages.
archive=$(echo "$packages"/*.tar.gz)
tar -C "$place/opt" -xf "$archive"
# The oldest glibc of docs/operating.md and INSTALL.md. Files that are no programs have no symbols.
oldest=GLIBC_2.34
newest=$({ find "$place/opt" -type f -exec objdump -T {} + 2>/dev/null || true; } |
    grep -oE 'GLIBC_2\.[0-9]+' | sort -Vu | tail -n 1)
printf '%s\n' "$newest" "$oldest" | sort -VC || fail "the programs need $newest"
mkdir "$place/srv/packages"
cp "$packages"/*.deb "$place/srv/packages"

# in_root COMMAND: runs it there, by a shell. exec_in_root: in the place of this shell.
in_root() {
    (exec_in_root "$1")
}
exec_in_root() {
    exec chroot "$place" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        DEBIAN_FRONTEND=noninteractive \
        ${user:+runuser -u "$user" --} sh -c "cd /srv/packages || exit
        $1"
}
# until CONDITION: waits until a command succeeds.
until_true() {
    for _ in $(seq 100); do
        eval "$1" && return
        sleep 0.1
    done
    fail "this did not happen: $1"
}
# files: what is there, without what packages leave in logs and caches of apt, dpkg and passwd.
files() {
    (cd "$place" && find . -xdev \( -path ./dev -o -path ./proc -o -path ./tmp -o -path ./srv \
        -o -path ./var/cache -o -path ./var/log -o -path ./var/lib/apt -o -path ./var/lib/dpkg \
        -o -path ./opt \) -prune -o -print | sort)
}

end_jobs() {
    local pid
    for pid in $(jobs -p); do
        kill "$pid" 2>/dev/null || true
    done
    wait
}

echo "the tarball works where it is unpacked, and has its library"
tree=/opt/$(basename "$archive" .tar.gz)
in_root "$tree/bin/smc demo --size 4M" >"$place/tmp/demo" 2>&1 || fail "$(cat "$place/tmp/demo")"
exec_in_root "exec $tree/bin/smc fabric" >"$place/tmp/fabric" 2>&1 &
until_true '[ -S "$place/tmp/smc-0/management.sock" ]'
in_root "$tree/bin/smc run --strict true" || fail "smc run of the tarball: $(cat "$place/tmp/fabric")"
end_jobs
rm -rf "$place/tmp/smc-0" # of `smc fabric`

# As the other systems have it: files of package $1, without those of documents and of AppArmor.
deb_files() {
    dpkg-deb --contents "$packages/$1"_*.deb | awk '$1 !~ /^d/ { print $6 }' |
        sed -E 's,^\.,,; s,^/lib/,/usr/lib/,; s,/vendor-completions/,/site-functions/,
            s,^/usr/lib/[^/]*-linux-gnu/,/usr/lib64/,' |
        grep -vE '^/usr/share/(doc|lintian)/|^/etc/apparmor' | sort
}
rpm_files() {
    rpm --query --package --queryformat '[%{FILEMODES:perms} %{FILENAMES}\n]' "$packages/$1"-[0-9]*.rpm |
        awk '$1 !~ /^d/ { print $2 }' | grep -vE '^/usr/share/(doc|licenses)/' | sort
}
echo "the RPM packages have the files of the Debian packages, and can be installed"
for name in vhost-device-ism smc smc-run libsmc0 libsmc-dev; do
    diff <(deb_files "$name") <(rpm_files "${name/%-dev/-devel}") || fail "$name: other files"
done
mkdir "$place/srv/rpm"
for script in PREIN POSTIN PREUN POSTUN; do
    rpm --query --package --queryformat "%{$script}" "$packages"/vhost-device-ism-[0-9]*.rpm |
        sh -n || fail "the script $script of vhost-device-ism"
done
rpm --root "$place/srv/rpm" --install --nodeps --noscripts "$packages"/*.rpm || fail "rpm --install"
in_root '/srv/rpm/usr/bin/smc run --help && /srv/rpm/usr/bin/vhost-device-ism --version' >"$place/tmp/said" ||
    fail "programs of the RPM packages: $(cat "$place/tmp/said")"
said=$(PKG_CONFIG_LIBDIR=$place/srv/rpm/usr/lib64/pkgconfig pkg-config --cflags --libs-only-L \
    --define-variable=prefix="$place/srv/rpm/usr" --keep-system-libs smc)
grep -q -- '-L/usr/lib64' <<<"$said" || fail "pkg-config of libsmc-devel: $said"
rpm --root "$place/srv/rpm" --erase --noscripts vhost-device-ism smc smc-run libsmc0 libsmc-devel || fail "rpm --erase"
left=$(cd "$place/srv/rpm" && find . -path '*ism*' -o -path '*/smc*' -o -path '*/licenses/*')
[ -z "$left" ] || fail "after the removal of the RPM packages there are: $left"

# The commands of the document -----------------------------------------------------------------------

before=$(files)
# What the output of a command has to fit, by a word of the command.
declare -A wanted=(
    ['smc connect']='SMC-D'
    ['stat fabric']='pool: [0-9]+ of 64 devices in use'
    ['check-config']='nothing is wrong; fabrics: 1, guests: 2'
    ['ctl reload']='added vm1'
    ['ctl list']='vm1 .*/run/vhost-device-ism/vm1.sock'
    ['ctl metrics']='ism_devices.guest="any",chid="ff00". 64'
)
commands=0
# run COMMAND: runs one of the document, and compares what it says with what is wanted.
run() {
    local command=$1 user word said
    commands=$((commands + 1))
    echo "\$ $command"
    # The user that the document has made.
    user=''
    case $command in 'smc '*) user=alice ;; esac
    case $command in
        *'&')
            exec_in_root "exec ${command%&}" >"$place/tmp/log$commands" 2>&1 &
            case $command in
                *' vhost-device-ism --config'*) until_true '[ -S "$place/run/vhost-device-ism/management.sock" ]' ;;
                'smc listen'*) until_true 'grep -qE ":1388 .* 0A " /proc/self/net/tcp*' ;;
            esac
            return
            ;;
        'apt-get purge'*)
            removal "$command"
            return
            ;;
        # The server writes the file, and may end after the client.
        cmp*) until_true 'in_root "$command" >/dev/null 2>&1' ;;
    esac
    said=$(in_root "$command" 2>&1) || fail "$command: $said $(cat "$place"/tmp/log* 2>/dev/null)"
    for word in "${!wanted[@]}"; do
        case $command in
            *"$word"*)
                grep -qE -- "${wanted[$word]}" <<<"$said" || fail "$command: $said"
                unset "wanted[$word]"
                ;;
        esac
    done
    case $command in
        'apt-get install'*) installed ;;
        'smc stat fabric'*)
            library
            debugged
            ;;
    esac
}

# installed: looks at the packages, while they are there and before the daemon runs.
installed() {
    for file in /usr/share/man/man8/vhost-device-ism.8.gz /usr/share/man/man1/smc-run.1.gz \
        /usr/share/bash-completion/completions/{smc,vhost-device-ism} \
        /usr/share/fish/vendor_completions.d/{smc,vhost-device-ism}.fish \
        /usr/share/zsh/vendor-completions/_{smc,vhost-device-ism} /lib/systemd/system/vhost-device-ism.service \
        /usr/share/doc/vhost-device-ism/examples/vhost-device-ism.socket \
        /usr/share/vhost-device-ism/grafana-dashboard.json \
        /usr/share/vhost-device-ism/grafana-programs.json \
        /usr/share/vhost-device-ism/prometheus-alerts.yaml \
        /usr/share/doc/vhost-device-ism/{operating,vhost-device-ism}.md.gz \
        /usr/share/doc/smc/preload.md.gz /usr/share/doc/smc/when-it-is-tcp.md.gz \
        /etc/apparmor.d/vhost-device-ism /etc/apparmor.d/local/vhost-device-ism; do
        [ -e "$place$file" ] || fail "there is no $file"
    done
    in_root 'id vhost-device-ism' >/dev/null || fail "there is no user"
    [ "$(stat -c '%a' "$place/run/vhost-device-ism")" = 750 ] || fail "mode of the directory"
    [ "$(chroot "$place" stat -c '%U:%G' /run/vhost-device-ism)" = vhost-device-ism:kvm ] ||
        fail "owner of the directory"
    echo "    files, user and directories are there"

    # A package of that name and those files, since the distribution has none.
    mkdir -p "$place/tmp/smc-tools/DEBIAN" "$place/tmp/smc-tools/usr/bin"
    printf 'Package: smc-tools\nVersion: 1.8.3\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n' \
        >"$place/tmp/smc-tools/DEBIAN/control"
    touch "$place"/tmp/smc-tools/usr/bin/smc{_run,_pnet,cd,cr,ss}
    in_root 'dpkg-deb --build /tmp/smc-tools /tmp/smc-tools.deb && dpkg -i /tmp/smc-tools.deb' >/dev/null ||
        fail "smc-tools cannot be installed beside smc"
    ! in_root 'dpkg -i ./smc-run_*.deb' >/dev/null 2>&1 || fail "smc-run is installed beside smc-tools"
    in_root 'dpkg --purge smc-run smc-tools && dpkg -i ./smc-run_*.deb' >/dev/null 2>&1 || fail "smc-run"
    in_root 'smc_run -r 20k -- true' 2>/dev/null || fail "smc_run"
    ! in_root 'smc_run -r 20x -- true' 2>/dev/null || fail "smc_run takes a wrong size"
    in_root 'smcss' | grep -q '^State  *UID  *Inode  *Local Address  *Peer Address  *Intf Mode$' || fail smcss
    in_root 'smcd device' | grep -q '^FID  *Type  *PCI-ID' || fail smcd
    in_root 'smcr -v' | grep -q '^smcr ' || fail smcr
    in_root 'dpkg --purge smc-run' >/dev/null
    echo "    smc-run instead of smc-tools, and smc beside it; smc_run, smcss, smcd, smcr"
}

# library: compiles the example in C on this host, with header and library of the tarball and of the
# packages, and runs it there.
library() {
    local example=/usr/share/doc/libsmc-dev/examples/echo.c options server said
    options=$(PKG_CONFIG_LIBDIR="$place$tree/lib/pkgconfig" pkg-config --cflags --libs smc)
    # shellcheck disable=SC2086 # these are several words
    cc -o "$place/tmp/echo" "$place$tree/doc/examples/echo.c" $options -pthread || fail "the tarball's libsmc"
    (user='' && in_root 'dpkg -i ./libsmc0_*.deb ./libsmc-dev_*.deb') >/dev/null || fail "libsmc"
    [ -e "$place/usr/share/doc/libsmc0/third-party-licences.txt.gz" ] || fail "no licences of libsmc0"
    options=$(PKG_CONFIG_LIBDIR=$(echo "$place"/usr/lib/*/pkgconfig) PKG_CONFIG_SYSROOT_DIR=$place \
        pkg-config --cflags --libs smc)
    # shellcheck disable=SC2086
    cc -o "$place/tmp/echo" "$place$example" $options -pthread || fail "libsmc-dev"
    exec_in_root 'exec env SMC_DEVICE=/run/vhost-device-ism/any/any.sock /tmp/echo server 127.0.0.1 5001' >"$place/tmp/echo.log" 2>&1 &
    server=$!
    until_true 'grep -q listening "$place/tmp/echo.log"'
    said=$(in_root 'SMC_DEVICE=/run/vhost-device-ism/any/any.sock /tmp/echo client 127.0.0.1 5001' 2>&1) || fail "the example in C: $said"
    grep -q '^SMC-D' <<<"$said" || fail "the example in C: $said"
    kill "$server"
    (user='' && in_root 'dpkg --purge libsmc-dev libsmc0') >/dev/null || fail "libsmc stays"
    echo "    the example in C is compiled with libsmc-dev, and echoes by SMC-D"
}

# backtraces: those of the daemon's threads.
backtraces() {
    gdb --batch --nx -iex "set sysroot $place" -iex "set debug-file-directory $place/usr/lib/debug" \
        -iex 'set debuginfod enabled off' "$place/usr/bin/vhost-device-ism" -p "$1" \
        -ex 'thread apply all backtrace' 2>&1
}

# debugged: the daemon that runs, in a debugger: without debug symbols, and with their package.
debugged() {
    local pid said program id user=''
    for program in vhost-device-ism:bin/vhost-device-ism smc:bin/smc smc:lib/smc/libsmc_preload.so; do
        id=$(readelf --notes "$place/usr/${program#*:}" | sed -n 's/^ *Build ID: *//p')
        dpkg-deb --contents "$packages/${program%:*}"-dbgsym_*.deb |
            grep "/usr/lib/debug/\.build-id/${id:0:2}/${id:2}\.debug\$" >/dev/null ||
            fail "no debug symbols of $program, build id $id"
        ! readelf --sections --wide "$place/usr/${program#*:}" | grep '\.debug_info\|\.symtab' >/dev/null ||
            fail "$program has debug symbols itself"
    done
    pid=$(grep -lx vhost-device-is /proc/[0-9]*/comm | grep -o "[0-9]*" | sort -n | head -1)
    said=$(backtraces "$pid")
    ! grep -q 'vhost_device_ism::.*\.rs:[0-9]' <<<"$said" || fail "symbols without their package: $said"
    in_root 'dpkg -i ./vhost-device-ism-dbgsym_*.deb' >/dev/null || fail "vhost-device-ism-dbgsym"
    said=$(backtraces "$pid")
    grep -q 'vhost_device_ism::.* at .*\.rs:[0-9]' <<<"$said" || fail "no symbols: $said"
    in_root 'dpkg --purge vhost-device-ism-dbgsym' >/dev/null || fail "vhost-device-ism-dbgsym stays"
    echo "    a debugger shows functions and lines of the daemon with vhost-device-ism-dbgsym"
}

# removal COMMAND: ends the daemon, as systemd would, purges the packages, and compares the files.
removal() {
    local left
    end_jobs
    in_root "userdel --remove alice 2>/dev/null; $1" >/dev/null 2>&1 || fail "$1"
    in_root 'userdel vhost-device-ism; groupdel kvm' 2>/dev/null || true
    left=$(comm -13 <(echo "$before") <(files) | grep -vE '^\./etc/(passwd|shadow|group|gshadow|subuid|subgid)-$' || true)
    [ -z "$left" ] || fail "after the removal there are: $left"
    echo "    nothing is left"
}

while IFS= read -r command; do
    run "$command"
done < <(sed -n 's/^\$ //p' docs/operating.md)
[ "$commands" -ge 15 ] || fail "docs/operating.md has only $commands commands"
[ ${#wanted[@]} = 0 ] || fail "no command for: ${!wanted[*]}"
[ -z "$(ls -A "$place/run/vhost-device-ism" 2>/dev/null)" ] || fail "sockets are left"

echo "the RPM package makes the same user"
in_root "$(rpm --query --package --queryformat '%{PREIN}' "$packages"/vhost-device-ism-[0-9]*.rpm)" ||
    fail "its script before the installation"
chroot "$place" id vhost-device-ism | grep -q '(kvm)' || fail "$(chroot "$place" id vhost-device-ism)"
echo "packages: all done"
