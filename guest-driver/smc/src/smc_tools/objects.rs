// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smcd` and `smcr`: devices, link groups, statistics and enterprise ids.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;

use clap::{ArgAction, Parser};
use guest_driver::socket::show_gid;
use guest_driver::statistics::Process;

use super::tool::{Tool, of_kernel};
use crate::error::CliError;
use crate::kernel::{self, Change};
use crate::stat::processes;

const LONG_ABOUT: &str = "\
Print devices, link groups and statistics of this user's processes, and enterprise ids of AF_SMC.
Objects, options and columns are those of smc-tools.

Objects, which can be abbreviated, and their commands:
  info        what the stack can [show]
  device      devices [show]
  linkgroup   connections between the same two peers [show; of smcr also link-show]
  stats       results of handshakes since each process began [show]
  ueid        user EIDs of AF_SMC [show; as root add EID, del EID, flush]
  seid        the system EID of AF_SMC [show; as root enable, disable]

\"smc stat\" tells more. Enterprise ids of this stack are an option of each program (--eid).";

/// Options and arguments.
#[derive(Debug, Parser)]
#[command(version, disable_version_flag = true, long_about = LONG_ABOUT,
          about = "Print devices, link groups and statistics of SMC")]
pub(super) struct Args {
    /// Print the version.
    #[arg(short, long, action = ArgAction::Version)]
    version: Option<bool>,

    /// With link-show, print RNICs and GIDs, too.
    #[arg(short, long)]
    details: bool,

    /// Count since the start, as without it.
    #[arg(short, long)]
    absolute: bool,

    /// info, device, linkgroup, stats, ueid or seid.
    #[arg(value_name = "OBJECT", value_parser = object)]
    object: Object,

    /// The command.
    #[arg(value_name = "COMMAND", default_value = "show")]
    command: String,

    /// An EID to add or to delete.
    argument: Option<String>,
}

/// smc-tools' long options have one dash.
pub(super) fn long_option(word: OsString) -> OsString {
    match word.to_str() {
        Some("-version" | "-details" | "-absolute" | "-help") => {
            format!("-{}", word.to_string_lossy()).into()
        }
        _ => word,
    }
}

/// The object to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    Info,
    Device,
    LinkGroup,
    Stats,
    Ueid,
    Seid,
}

/// The object whose name begins so, as iproute2 abbreviates.
fn object(word: &str) -> Result<Object, String> {
    const NAMES: [(&str, Object); 6] = [
        ("device", Object::Device),
        ("info", Object::Info),
        ("linkgroup", Object::LinkGroup),
        ("stats", Object::Stats),
        ("ueid", Object::Ueid),
        ("seid", Object::Seid),
    ];
    let found: Vec<_> = NAMES.iter().filter(|(name, _)| name.starts_with(word)).collect();
    match found[..] {
        [(_, object)] => Ok(*object),
        [] => Err("expected info, device, linkgroup, stats, ueid or seid".into()),
        _ => Err("it is short for several".into()),
    }
}

/// The whole output.
///
/// # Errors
/// An unknown command for the object; AF_SMC is missing, or refuses.
pub(super) fn text(tool: Tool, args: &Args) -> Result<String, CliError> {
    let show = "show".starts_with(args.command.as_str());
    let all = || processes::all().list;
    match args.object {
        Object::Info if show => Ok(info()),
        Object::Device if show => Ok(devices(tool, &all())),
        Object::Stats if show => Ok(statistics(tool, &all())),
        Object::LinkGroup if show => Ok(link_groups(tool, &all())),
        Object::LinkGroup if tool == Tool::Smcr && "link-show".starts_with(&args.command) => {
            Ok(links(&all(), args.details))
        }
        Object::Ueid if show => {
            let eids = of_kernel(kernel::ueids())?;
            Ok(eids.iter().map(|eid| format!("{eid}\n")).collect())
        }
        Object::Seid if show => Ok(match of_kernel(kernel::seid())? {
            Some((eid, on)) => format!("{eid} {}\n", if on { "[ENABLED]" } else { "[DISABLED]" }),
            None => "n/a\n".into(),
        }),
        Object::Ueid | Object::Seid => change(args).map(|()| String::new()),
        _ => Err(CliError::Tool(format!("there is no command {:?} for it", args.command))),
    }
}

fn change(args: &Args) -> Result<(), CliError> {
    let eid = || {
        let name = args.argument.as_deref();
        name.ok_or_else(|| CliError::Tool(format!("{} needs an EID", args.command)))
    };
    let change = match (args.object, args.command.as_str()) {
        (Object::Ueid, "add") => Change::Add(eid()?),
        (Object::Ueid, "del") => Change::Remove(eid()?),
        (Object::Ueid, "flush") => Change::Flush,
        (Object::Seid, "enable") => Change::System(true),
        (Object::Seid, "disable") => Change::System(false),
        _ => {
            return Err(CliError::Tool(format!("there is no command {:?} for it", args.command)));
        }
    };
    kernel::change(change).map_err(CliError::io("cannot change AF_SMC's enterprise ids"))
}

fn info() -> String {
    let host = rustix::system::uname();
    format!(
        "Stack Capabilities\n\
         SMC Version:      2.1\n\
         SMC Hostname:     {}\n\
         SMC-D Features:   v2\n\
         SMC-R Features:   v1 v2\n",
        host.nodename().to_string_lossy()
    )
}

fn devices(tool: Tool, processes: &[Process]) -> String {
    if tool == Tool::Smcr {
        return rnics(processes);
    }
    let mut text = "FID  Type  PCI-ID        PCHID  InUse  #LGs  PNET-ID\n".to_owned();
    for process in processes {
        for device in &process.devices {
            let Some(chid) = &device.chid else { continue };
            let own = process.connections.iter().filter_map(|connection| {
                let info = connection.smc_d.as_ref()?;
                (Some(info.local_gid.to_string()) == device.gid).then_some(info.peer_gid)
            });
            let mut peers: Vec<_> = own.collect();
            peers.sort_unstable();
            peers.dedup();
            let in_use = if peers.is_empty() { "No" } else { "Yes" };
            let _ = writeln!(
                text,
                "0000 ISM   {:<12}  {chid:<4}   {in_use:<5}  {:>4}",
                short(&device.path),
                peers.len()
            );
        }
    }
    text
}

/// The address of a PCI device, or the name of a socket.
fn short(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn rnics(processes: &[Process]) -> String {
    let heading = "Net-Dev         IB-Dev   IB-P  IB-State  Type          Crit  #Links  PNET-ID\n";
    let mut all = BTreeMap::new();
    for rnic in processes.iter().flat_map(|process| &process.rnics) {
        let links = all.entry((rnic.name.clone(), rnic.port)).or_insert((rnic, 0));
        links.1 += rnic.links;
    }
    let line = |(rnic, links): &(&guest_driver::socket::RnicInfo, usize)| {
        format!(
            "{:<15} {:<8} {:>4}  {:>8}  {:<13}  {:>3}   {links:>6}  {}\n",
            rnic.netdev.as_deref().unwrap_or("n/a"),
            rnic.name,
            rnic.port,
            if rnic.active { "ACTIVE" } else { "INACTIVE" },
            "n/a",
            "n/a",
            rnic.pnet.as_deref().unwrap_or_default()
        )
    };
    std::iter::once(heading.to_owned()).chain(all.values().map(line)).collect()
}

fn link_groups(tool: Tool, processes: &[Process]) -> String {
    let mut text = String::new();
    if tool == Tool::Smcr {
        text += "LG-ID    LG-Role  LG-Type  VLAN  #Conns  PNET-ID\n";
        for group in processes.iter().flat_map(|process| &process.groups) {
            let role = if group.server { "SERV" } else { "CLNT" };
            let _ = writeln!(
                text,
                "{:08x} {role:<8} {:<8}  0x0  {:>6}",
                group.group,
                topology(&group.topology),
                group.connections
            );
        }
        return text;
    }
    text += "LG-ID    VLAN  #Conns  PNET-ID\n";
    let mut groups = BTreeMap::new();
    for info in processes.iter().flat_map(|process| &process.connections) {
        if let Some(info) = &info.smc_d {
            *groups.entry((info.local_gid, info.peer_gid)).or_insert(0) += 1;
        }
    }
    // SMC-D has no numbers for link groups on the wire; the numbers here are counted as in Linux.
    for (n, connections) in groups.values().enumerate() {
        let _ = writeln!(text, "{:08x}  0x0  {connections:>6}", (n + 1) << 8);
    }
    text
}

fn links(processes: &[Process], details: bool) -> String {
    let mut text = "LG-ID    LG-Role  LG-Type  Net-Dev         Link-State      #Conns".to_owned();
    if details {
        text += "  IB-Dev    IB-P  Local-GID                                 Peer-GID";
    }
    text.push('\n');
    for process in processes {
        for group in &process.groups {
            let role = if group.server { "SERV" } else { "CLNT" };
            for link in &group.links {
                let rnic = process.rnics.iter().find(|rnic| rnic.name == link.rnic);
                let _ = write!(
                    text,
                    "{:08x} {role:<8} {:<8} {:<15} {:<15} {:>6}",
                    group.group,
                    topology(&group.topology),
                    rnic.and_then(|rnic| rnic.netdev.as_deref()).unwrap_or("n/a"),
                    link_state(&link.state),
                    link.connections
                );
                if details {
                    let _ = write!(
                        text,
                        "  {:<8}  {:>4}  {:<40}  {}",
                        link.rnic,
                        link.port,
                        show_gid(link.local_gid),
                        show_gid(link.peer_gid)
                    );
                }
                text.push('\n');
            }
        }
    }
    text
}

fn topology(words: &str) -> String {
    match words {
        "single" => "SINGLE".into(),
        "symmetric" => "SYM".into(),
        "asymmetric (peer)" => "ASYMP".into(),
        "asymmetric (local)" => "ASYML".into(),
        "none" => "NONE".into(),
        other => other.to_uppercase(),
    }
}

fn link_state(words: &str) -> &'static str {
    match words {
        "active" => "LINK_ACTIVE",
        "preparing" | "adding" | "confirming" | "being made" => "LINK_ACTIVATING",
        _ => "LINK_INACTIVE",
    }
}

fn statistics(tool: Tool, processes: &[Process]) -> String {
    let sum = |of: fn(&guest_driver::statistics::Handshakes) -> u64| -> u64 {
        processes.iter().map(|process| of(&process.totals)).sum()
    };
    let (smc, tcp, broken) = match tool {
        Tool::Smcr => (sum(|all| all.smc_r), sum(|all| all.tcp), sum(|all| all.broken)),
        _ => (sum(|all| all.smc_d), sum(|all| all.tcp), sum(|all| all.broken)),
    };
    let name = if tool == Tool::Smcr { "SMC-R" } else { "SMC-D" };
    let mut text = format!("{name} Connections Summary\n");
    for (what, count) in [
        ("Total connections handled", smc + tcp + broken),
        ("SMC connections", smc),
        ("Handshake errors", broken),
        ("TCP fallback", tcp),
    ] {
        let _ = writeln!(text, "  {what:<28}{count:>12}");
    }
    text
}

#[cfg(test)]
mod tests {
    use guest_driver::socket::{LinkGroupInfo, LinkInfo, RnicInfo};
    use guest_driver::statistics::Handshakes;

    use clap::CommandFactory;

    use super::*;

    fn process() -> Process {
        let link = LinkInfo {
            rnic: "mlx5_0".into(),
            port: 1,
            state: "active".into(),
            connections: 3,
            ..LinkInfo::default()
        };
        let group = LinkGroupInfo {
            group: 0x300,
            server: true,
            topology: "single".into(),
            connections: 3,
            links: vec![link],
            ..LinkGroupInfo::default()
        };
        let rnic = RnicInfo {
            name: "mlx5_0".into(),
            port: 1,
            active: true,
            netdev: Some("eth1".into()),
            pnet: Some("NET1".into()),
            links: 1,
            ..RnicInfo::default()
        };
        Process {
            groups: vec![group],
            rnics: vec![rnic],
            totals: Handshakes { smc_d: 5, smc_r: 3, tcp: 2, ..Handshakes::default() },
            ..Process::default()
        }
    }

    #[test]
    fn columns_are_those_of_smc_tools() {
        assert_eq!(
            rnics(&[process()]),
            "Net-Dev         IB-Dev   IB-P  IB-State  Type          Crit  #Links  PNET-ID\n\
             eth1            mlx5_0      1    ACTIVE  n/a            n/a        1  NET1\n"
        );
        assert_eq!(
            link_groups(Tool::Smcr, &[process()]),
            "LG-ID    LG-Role  LG-Type  VLAN  #Conns  PNET-ID\n\
             00000300 SERV     SINGLE    0x0       3\n"
        );
        assert_eq!(
            links(&[process()], false),
            "LG-ID    LG-Role  LG-Type  Net-Dev         Link-State      #Conns\n\
             00000300 SERV     SINGLE   eth1            LINK_ACTIVE          3\n"
        );
        assert_eq!(
            statistics(Tool::Smcd, &[process(), process()]),
            "SMC-D Connections Summary\n  Total connections handled             14\n  \
             SMC connections                       10\n  Handshake errors                       0\n  \
             TCP fallback                           4\n"
        );
    }

    #[test]
    fn objects_can_be_abbreviated_and_options_have_one_dash() {
        assert_eq!(object("d"), Ok(Object::Device));
        assert_eq!(object("li"), Ok(Object::LinkGroup));
        assert_eq!(object("s"), Err("it is short for several".into()));
        assert_eq!(object("se"), Ok(Object::Seid));
        assert!(object("x").is_err());
        assert_eq!(long_option("-details".into()), "--details");
        assert_eq!(long_option("-d".into()), "-d");
        Args::command().debug_assert();
    }
}
