#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# The files of `cargo xtask release --trial`, of the packages that tests/packages/run.sh has just built:
# checksums, signature, crates, and the container image, whose layers are unpacked and run. The image's
# root file system is the archive named by the first argument.
#
# With --twice in its place the script makes two whole releases in two directories, in half an hour on two
# processors, and compares them. It needs no root; as root it also runs the static program in a directory
# without any library.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

if [ "$1" = --twice ]; then
    # Both now: meanwhile, the checkout may get another commit.
    git clone --quiet . "$place/one"
    git clone --quiet . "$place/another-place"
    for name in one another-place; do
        (cd "$place/$name" && unset CARGO_TARGET_DIR && cargo xtask release)
        rm -rf "$place/$name/target/release-build"
    done
    diff "$place"/{one,another-place}/target/published/SHA256SUMS || fail "two builds differ"
    program=$(echo "$place"/one/target/published/smc-*-static)
    "$program" --version
    if [ "$(id -u)" = 0 ]; then
        mkdir "$place/empty"
        cp "$program" "$place/empty/smc"
        chroot "$place/empty" /smc --version
        chroot "$place/empty" /smc decode e2d4c3d904001c10 >/dev/null || [ $? = 1 ]
    fi
    echo "release: two builds are equal"
    exit
fi

command -v ssh-keygen >/dev/null || fail "there is no ssh-keygen"
ssh-keygen -q -t ed25519 -N '' -C test -f "$place/key"
awk '{ print "test", $1, $2 }' "$place/key.pub" >"$place/keys"
cargo xtask release --trial --key "$place/key" --base "$1" >"$place/list"
published=${CARGO_TARGET_DIR:-$PWD/target}/published
(cd "$published" && sha256sum --check --quiet SHA256SUMS)
ssh-keygen -Y verify -f "$place/keys" -I test -n file -s "$published/SHA256SUMS.sig" \
    <"$published/SHA256SUMS"
for kind in deb rpm crate tar.gz oci.tar cdx.json; do
    grep -q "\.$kind (" "$place/list" || fail "no .$kind"
done
grep -q 'ssh-keygen -Y verify' "$published/release-notes.md"

echo "the programs of the image run in its root file system"
mkdir "$place/layout" "$place/root"
tar -C "$place/layout" -xf "$published"/*.oci.tar
# The layers are in the manifest in their order.
(cd "$place/layout/blobs/sha256" && for blob in *; do echo "$blob  $blob"; done | sha256sum --check --quiet)
manifest=$(grep -l '"layers":\[' "$place"/layout/blobs/sha256/*)
for layer in $(sed 's/.*"layers":\[//' "$manifest" | grep -o 'sha256:[0-9a-f]*' | cut -d: -f2); do
    tar -C "$place/root" --exclude='./dev/*' -xzf "$place/layout/blobs/sha256/$layer"
done
prefix=/usr/local/vhost-device-ism
for program in smc vhost-device-ism; do
    chroot "$place/root" "$prefix/bin/$program" --version
done
chroot "$place/root" "$prefix/libexec/smc-device-plugin" --help >/dev/null
echo "release: all done"
