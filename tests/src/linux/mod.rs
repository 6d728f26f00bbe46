//! What Linux itself has of SMC-R: soft-RoCE adapters, AF_SMC and what can be asked about both.
//!
//! It is for guests: everything here wants root and a kernel that has these things.

mod netlink;
pub mod rdma;

use crate::linux::rdma::adapters;

/// `smc-test-peer rdma ...`
///
/// ```text
/// add NAME INTERFACE   a soft-RoCE adapter on a network interface
/// remove NAME
/// show                 adapters, a line each, and their GIDs
/// ```
///
/// # Panics
/// It is asked for something else, or the kernel refuses.
pub fn rdma(args: &[&str], say: fn(&str)) {
    match *args {
        ["add", name, interface] => {
            rdma::add(name, interface).unwrap_or_else(|e| panic!("{name} on {interface}: {e}"));
        }
        ["remove", name] => rdma::remove(name).unwrap_or_else(|e| panic!("{name}: {e}")),
        ["show"] => {
            for adapter in adapters() {
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
