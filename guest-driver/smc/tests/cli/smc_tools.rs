// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smcss`, `smcd` and `smcr`: names of the command for the functions of smc-tools.

use std::io::Read;
use std::os::unix::fs::MetadataExt;

use crate::support::{Fabric, text};

fn output(fabric: &Fabric, name: &str, args: &[&str]) -> String {
    let output = fabric.smc_as(name).args(args).output().unwrap();
    assert!(output.status.success(), "{name} {args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn both_ends_of_a_connection_are_sockets_of_smc_d() {
    let fabric = Fabric::start("smc-tools");
    let (mut server, port, _log) = fabric.listen(&[]);
    let _client = crate::stat::client(&fabric, port, &[]);
    server.0.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();

    let sockets = output(&fabric, "smcss", &[]);
    let mut lines = sockets.lines();
    let heading = "State UID Inode Local Address Peer Address Intf Mode";
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(words(lines.next().unwrap()), heading, "{sockets}");
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2, "{sockets}");
    let uid = std::fs::metadata("/proc/self").unwrap().uid();
    for row in &rows {
        let [state, user, inode, _, _, _, mode] = row[..] else { panic!("{sockets}") };
        assert_eq!((state, mode), ("ACTIVE", "SMCD"), "{sockets}");
        assert_eq!(user.parse(), Ok(uid), "{sockets}");
        assert_ne!(inode.parse(), Ok(0), "{sockets}");
    }
    assert_eq!((rows[0][3], rows[0][4]), (rows[1][4], rows[1][3]), "{sockets}");

    let listening = output(&fabric, "smcss", &["-l"]);
    assert!(listening.contains("LISTEN") && listening.contains(&format!(":{port}")), "{listening}");
    assert!(output(&fabric, "smcss", &["-D"]).contains("Peer-GID"));
    assert_eq!(output(&fabric, "smcss", &["-R"]).lines().count(), 1);

    let devices = output(&fabric, "smcd", &["dev"]);
    assert_eq!(devices.matches(" ff00 ").count(), 2, "{devices}");
    assert_eq!(devices.matches(" Yes ").count(), 2, "{devices}");
    assert_eq!(output(&fabric, "smcd", &["linkgroup", "show"]).lines().count(), 3);
    assert!(
        output(&fabric, "smcd", &["stats"]).contains("SMC connections                        2")
    );
    assert!(output(&fabric, "smcr", &["info"]).contains("SMC-R Features:   v1 v2"));
}

#[test]
fn wrong_words_are_refused_with_their_reason() {
    let fabric = Fabric::start("smc-tools-wrong");
    for (name, args, says) in [
        ("smcd", &["frobnicate"][..], "expected info, device, linkgroup"),
        ("smcd", &["s"], "short for several"),
        ("smcd", &["device", "link-show"], "there is no command"),
        ("smcd", &["ueid", "add"], "add needs an EID"),
        ("smcss", &["-D", "-R"], "cannot be used with"),
    ] {
        let output = fabric.smc_as(name).args(args).output().unwrap();
        assert!(!output.status.success(), "{name} {args:?}");
        assert!(text(&output.stderr).contains(says), "{}", text(&output.stderr));
    }
}
