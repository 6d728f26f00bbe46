// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network namespaces in the role of hosts, and the cable between them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use super::child::Program;
use super::logs::Logs;
use crate::watch::eventually;

/// Bytes of a packet on the cable, enough for whole frames of the guests' Ethernet.
const MTU: &str = "9000";

/// A network namespace with one interface, ending with its last program.
#[derive(Debug)]
pub(super) struct Namespace {
    holder: Program,
    /// The interface's address.
    pub(super) address: String,
}

impl Namespace {
    /// Two namespaces, with a cable between.
    #[track_caller]
    pub(super) fn pair(logs: [&Logs; 2]) -> [Namespace; 2] {
        let [one, two] = [(logs[0], "10.9.0.1"), (logs[1], "10.9.0.2")];
        let [one, two] = [one, two].map(|(logs, address)| Namespace::new(logs, address));
        let there = two.holder.pid().to_string();
        one.ip(&["link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", &there]);
        for end in [&one, &two] {
            end.ip(&["link", "set", "lo", "up"]);
            end.ip(&["address", "add", &format!("{}/24", end.address), "dev", "cable"]);
            end.ip(&["link", "set", "cable", "mtu", MTU, "up"]);
        }
        [one, two]
    }

    #[track_caller]
    fn new(logs: &Logs, address: &str) -> Namespace {
        let own = fs::read_link("/proc/self/ns/net").unwrap();
        let words = ["unshare", "--net", "sleep", "infinity"];
        let holder = Program::start("a network namespace", &words, &[], &logs.open("network.log"));
        let namespace = Namespace { holder, address: address.to_owned() };
        eventually("there is a network namespace", || {
            assert!(namespace.holder.ended().is_none(), "unshare --net has failed");
            fs::read_link(namespace.path()).is_ok_and(|there| there != own)
        });
        namespace
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.holder.pid()).into()
    }

    /// The words in front of a command to be run in the namespace.
    pub(super) fn enter(&self) -> [String; 3] {
        ["nsenter".into(), format!("--net={}", self.path().display()), "--".into()]
    }

    #[track_caller]
    fn ip(&self, words: &[&str]) {
        let [enter, net, end] = self.enter();
        let output = Command::new(enter).args([&net, &end, "ip"]).args(words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "ip {words:?}: {said}");
    }
}
