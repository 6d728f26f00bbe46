// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs for file transfer.

use std::process::Command;

use crate::bed::{Net, Place, Program};
use crate::case::{Carried, times};
use crate::script::Script;

/// Runs a preparatory command.
fn prepare(place: &Place, text: &str) {
    place.script("prepare", text);
    let mut bash = Command::new("bash");
    bash.arg(place.dir.join("prepare.sh")).env("HOME", &place.dir).current_dir(&place.dir);
    let output = bash.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// A directory `tree` with some hundred files of random bytes, hard to compress.
const TREE: &str = r#"
mkdir -p tree/more
head -c 4000000 /dev/urandom | split -b 40000 -a 3 - tree/file.
cp tree/file.aa[a-j] tree/more
"#;

/// git's daemon executes a program to take over the connection.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn git() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let text = format!(
            "{TREE}
            git config --global safe.directory '*'
            git init -q -b main tree
            cd tree
            git add .
            git -c user.name=test -c user.email=test@example.org commit -q -m files\n"
        );
        prepare(place, &text);
        let there = format!("--listen={address} --port={port} --base-path={}", dir.display());
        Program::new(format!("git daemon --reuseaddr --export-all {there}"))
    };
    for protocol in [0, 2] {
        let client = format!(
            "for n in $(seq $N); do
                git -c protocol.version={protocol} clone -q git://$A:$P/tree $D/clone
                [ $(git -C $D/clone rev-parse HEAD) = $(git -C $D/tree rev-parse HEAD) ]
                diff -r -x .git $D/tree $D/clone
                rm -r $D/clone
            done
            rate $N\n"
        );
        Script {
            name: &format!("git clone, protocol {protocol}"),
            needs: &["git"],
            server: &server,
            client: &client,
            count: times(5, 50),
            carried: Carried::Never,
        }
        .run(&net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn rsync() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        prepare(place, &format!("{TREE}\nmkdir up\n"));
        let text = format!(
            "use chroot = no\nlog file = {here}/rsync.log\nuid = 0\ngid = 0\n\
             [tree]\npath = {here}/tree\n[up]\npath = {here}/up\nread only = no\n"
        );
        std::fs::write(dir.join("rsyncd.conf"), text).unwrap();
        let there = format!("--address={address} --port={port} --config={here}/rsyncd.conf");
        Program::new(format!("rsync --daemon --no-detach {there}"))
    };
    Script {
        name: "rsync daemon",
        needs: &["rsync"],
        server: &server,
        client: r#"
        for n in $(seq $N); do
            rsync -a rsync://$A:$P/tree/ $D/down/
            diff -r $D/tree $D/down
            rsync -a --delete $D/down/ rsync://$A:$P/up/
            diff -r $D/tree $D/up
            rm -r $D/down $D/up/*
        done
        rate $((2 * N))
        "#,
        count: times(3, 20),
        carried: Carried::Both,
    }
    .run(&net);
}

/// A server that makes its processes by clone(2) and forbids itself descriptors.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn vsftpd() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        // The server wants a root directory without write permission.
        prepare(place, &format!("mkdir -m 755 empty root\ncd root\n{TREE}\nmkdir -m 777 up\n"));
        let text = format!(
            "listen=YES\nlisten_address={address}\nlisten_port={port}\nbackground=NO\n\
             anonymous_enable=YES\nno_anon_password=YES\nlocal_enable=NO\nanon_root={here}/root\n\
             secure_chroot_dir={here}/empty\nwrite_enable=YES\n\
             anon_upload_enable=YES\nanon_umask=022\n"
        );
        std::fs::write(dir.join("vsftpd.conf"), text).unwrap();
        Program::new(format!("vsftpd {here}/vsftpd.conf"))
    };
    Script {
        name: "vsftpd, lftp",
        needs: &["vsftpd", "lftp"],
        server: &server,
        client: r#"
        set='set net:timeout 15; set net:max-retries 2; set cmd:fail-exit yes'
        for n in $(seq $N); do
            mkdir $D/down
            get="mget -P 2 -O $D/down tree/file.*"
            lftp -c "$set; open ftp://$A:$P; $get; cd up; put $D/root/tree/file.aaa -o $n"
            diff -r -x more $D/root/tree $D/down
            cmp $D/root/tree/file.aaa $D/root/up/$n
            rm -r $D/down
        done
        rate $N
        "#,
        count: times(1, 10),
        carried: Carried::Never,
    }
    .run(&net);
}
