// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The chapter about the QEMU of a distribution: two guests by vfio-user.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// Makes a command of the QEMU with its files in `root`. The QEMU's libraries are of another
/// distribution than this machine's. Not each machine with a /dev/kvm can run guests by KVM, and
/// emulated time may come late. Returns the directory of the command.
fn make_qemu(page: &Page, root: &Path) -> PathBuf {
    let bin = page.bed.path("bin");
    fs::create_dir(&bin).unwrap();
    let qemu = bin.join("qemu-system-x86_64");
    let (lib, share) = (root.join("usr/lib/x86_64-linux-gnu"), root.join("usr/share"));
    let (lib, share) = (lib.display(), share.display());
    let run = format!(
        r#"#!/bin/bash
        args=()
        while [ $# -gt 0 ]; do
            case "${{ACCEL:-tcg}} $1 ${{2:-}}" in
            "tcg -accel kvm") ;;
            "tcg -append "*) args+=("$1" "$2 no_timer_check") ;;
            *) args+=("$1"); shift; continue ;;
            esac
            shift 2
        done
        export QEMU_MODULE_DIR={lib}/qemu
        exec {lib}/ld-linux-x86-64.so.2 --library-path {lib}:{lib}/pulseaudio \
            {root}/usr/bin/qemu-system-x86_64 -L {share}/seabios -L {share}/qemu "${{args[@]}}""#,
        root = root.display()
    );
    fs::write(&qemu, run).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    let version = page.bed.program("version", &[qemu.to_str().unwrap(), "-version"]);
    assert!(version.wait(Duration::from_secs(30)).success());
    bin
}

/// Ends the daemon of a page like a crash. The daemon is the child of its terminal's shell.
fn kill_daemon(page: &Page) {
    let socket = format!("{}/a.sock,vfio-user", page.sockets.display());
    let is_daemon = |process: &Path| {
        let words = fs::read(process.join("cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words);
        let mut words = words.split('\0');
        words.next().is_some_and(|name| name.ends_with("vhost-device-ism"))
            && words.any(|word| word == socket)
    };
    let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<_> = processes.filter(|process| is_daemon(process)).collect();
    assert!(!found.is_empty(), "no daemon");
    for process in found {
        let ended = Command::new("kill").arg("-9").arg(process.file_name().unwrap()).status();
        assert!(ended.unwrap().success());
    }
}

#[test]
fn the_commands_start_two_guests_that_talk_and_outlive_the_daemon() {
    // The files of a distribution whose QEMU has the client; `tests/vfio-user/run.sh` gets them.
    let Some(root) = std::env::var_os("VFIO_USER_ROOT").map(PathBuf::from) else {
        print_always("NOT TESTED here: vfio-user. tests/vfio-user/run.sh tests it");
        return;
    };
    let talk = |page: &Page| {
        let path = format!("export PATH={}:$PATH\n", make_qemu(page, &root).display());
        let daemon = page.daemon(&block("vfio-user daemon"));
        let mut guests = page.guests(&(path + &block("vfio-user")));
        let [a, _] = page.talk(&mut guests);
        assert!(a.contains("move"), "{a}");
        (daemon, guests)
    };
    let page = Page::new();
    let (daemon, [a, mut b]) = talk(&page);
    kill_daemon(&page);
    let from = b.text().len();
    b.types("smc devices");
    b.shows_after(from, "vfio-pci, cannot be used");
    b.types("ping -c 1 10.0.0.1 && echo they go \"\"on");
    b.shows_after(from, "they go on");
    drop((daemon, a, b));
    // Newly started guests have their devices again.
    drop(talk(&Page::new()));
}
