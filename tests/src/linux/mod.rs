// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Linux's own parts of SMC-R: soft-RoCE adapters, AF_SMC, and queries of both.
//!
//! For guests: every call here needs root and a kernel with these features.

mod allocations;
mod kernel;
pub mod rdma;
mod socket;

pub use allocations::Allocation;
pub use kernel::{Counts, Fallbacks, Group, GroupLink, counts, fallbacks, groups};
pub use socket::{listener, stream};

use af_smc::{Change, Socket};
use serde::{Deserialize, Serialize};

/// AF_SMC's state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Smc {
    /// Enterprise ids.
    pub ueids: Vec<String>,
    /// AF_SMC's sockets.
    pub sockets: Vec<Socket>,
    /// SMC-R link groups.
    pub groups: Vec<Group>,
    /// Counters of SMC-R.
    pub counts: Counts,
    /// Why connections became TCP.
    pub fallbacks: Vec<Fallbacks>,
}

/// `smc-test-peer linux ...`
///
/// ```text
/// show                 everything, see [`Smc`], as JSON
/// ueid NAME            adds an enterprise id
/// no-ueids             forgets the enterprise ids
/// set VARIABLE VALUE   a variable of /proc/sys/net/smc
/// fail-writes FILE TEXT UNDO N
///                      writes TEXT to FILE once for each of the write's first N allocations of pages, each
///                      failing in turn; after a success TEXT goes to UNDO: says how many writes failed
/// ```
///
/// # Panics
/// On any other words, or if the kernel refuses.
pub fn run(args: &[&str], say: fn(&str)) {
    match *args {
        ["show"] => {
            let smc = Smc {
                ueids: af_smc::ueids().unwrap(),
                sockets: af_smc::sockets().unwrap(),
                groups: groups().unwrap(),
                counts: counts().unwrap(),
                fallbacks: fallbacks().unwrap(),
            };
            say(&serde_json::to_string(&smc).unwrap());
        }
        ["ueid", name] => {
            af_smc::change(Change::Add(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
        }
        ["no-ueids"] => af_smc::change(Change::Flush).unwrap(),
        ["set", name, value] => {
            kernel::set(name, value).unwrap_or_else(|e| panic!("{name} = {value}: {e}"));
        }
        ["fail-writes", file, text, undo, n] => {
            let failed = allocations::fail_writes(file, text, undo, n.parse().unwrap()).unwrap();
            say(&format!("{failed} writes failed"));
        }
        _ => panic!("unknown arguments: {args:?}"),
    }
}

/// `smc-test-peer rdma ...`
///
/// ```text
/// add NAME INTERFACE   a soft-RoCE adapter on a network interface
/// remove NAME
/// show                 adapters, a line each, and their GIDs
/// ```
///
/// # Panics
/// On any other words, or if the kernel refuses.
pub fn rdma(args: &[&str], say: fn(&str)) {
    match *args {
        ["add", name, interface] => {
            rdma::add(name, interface).unwrap_or_else(|e| panic!("{name} on {interface}: {e}"));
        }
        ["remove", name] => rdma::remove(name).unwrap_or_else(|e| panic!("{name}: {e}")),
        ["show"] => {
            for adapter in rdma::adapters() {
                let node = adapter.node.as_deref().unwrap_or("no node");
                say(&format!("{} {} {node}", adapter.name, adapter.state));
                for gid in adapter.gids {
                    say(&format!("  {} {} {} {}", gid.index, gid.gid, gid.kind, gid.interface));
                }
            }
        }
        _ => panic!("unknown arguments: {args:?}"),
    }
}
