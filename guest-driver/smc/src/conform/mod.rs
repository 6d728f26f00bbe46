// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc conform`: the conformance suite against an implementation of SMC.

mod captures;
mod device;
mod files;
mod rnic;

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use smc_conform::{Announce, Cases, Fabric, Names, Options, RdmaDevice, Report, RunHeader, Target};
use smc_core::wire::ids::Eid;
use smc_rendezvous::{Mode, Options as RendezvousOptions, PeerDiscovery};
use virtio_ism::IsmDevice;

use crate::address::{parse_listen, parse_server};
use crate::error::CliError;
use crate::output;
use device::{OnFabric, OptionClient};
use files::ReportFiles;
use rnic::Rnic;

/// Help of `smc conform`.
pub(crate) const LONG_ABOUT: &str = "\
Plays some hundred well-formed and malformed dialogues with an implementation of SMC, and tells which
rules of RFC 7609 and SMCv2.1 it keeps. The implementation is a server (HOST:PORT), or a client that
connects here (--listen, --run). The suite has an encoder of its own and no code of an SMC stack.

A verdict is PASS, FAIL, DEVIATES-AS-LINUX (not as specified, and Linux is known to do the same),
NOT-APPLICABLE (the target lacks what the case is about), NOT-OBSERVABLE (the suite cannot see it here).

The suite first sends one Proposal that no server can use. If the answer is no CLC message it ends, so
an ordinary TCP server gets 224 bytes and nothing more. With --device it takes a device on a fabric of
the target, by which SMC-D comes about; without one the target declines, and much is not applicable.
With --rnic it makes links of SMC-R, for the level llc, and with --echo for data over them.

Without --aggressive the suite opens at most --connections connections at a time, sends nothing that
is known to stall or to end connections of others, and names only its own GID.";

/// End of the help of `smc conform`.
pub(crate) const AFTER: &str = "\
Examples:
  smc listen --echo --tcp-ok 5000                                 a target
  smc conform --echo --device ~/.smc/b.sock localhost:5000        all that can be seen of it
  smc conform --html report.html --json report.json db:5432       reports
  smc conform --listen 0 --run 'smc connect --tcp-ok 127.0.0.1:{port}'    a client
  smc conform --list                                              what there is

Exit status: 0 no MUST failed, 1 at least one failed, 2 the suite did not run.";

/// Factor on the time for a repeated case.
const TIME_FACTOR: u32 = 4;

/// A level of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Layer {
    /// The messages on TCP.
    Clc,
    /// The messages on a link of SMC-R; needs --rnic.
    Llc,
    /// Data and cursors, over SMC-D with --device and over SMC-R with --rnic; needs --echo.
    Cdc,
    /// TCP option 254; needs CAP_BPF and CAP_NET_ADMIN.
    Option,
}

impl Layer {
    fn name(self) -> &'static str {
        match self {
            Layer::Clc => "clc",
            Layer::Llc => "llc",
            Layer::Cdc => "cdc",
            Layer::Option => "option",
        }
    }
}

/// Options of `smc conform`.
#[derive(Args, Debug)]
pub(crate) struct ConformArgs {
    /// The server under test.
    #[arg(value_name = "HOST:PORT", required_unless_present_any = ["listen", "list", "compare"])]
    server: Option<String>,

    /// Wait here for the client under test; port 0 is any free port.
    #[arg(long, value_name = "[HOST:]PORT", conflicts_with = "server")]
    listen: Option<String>,

    /// Run this command line of the shell for each connection, with {port} replaced by the port to
    /// connect to. Data that TCP carries is looked for at its standard input and output.
    #[arg(long, value_name = "COMMAND", requires = "listen")]
    run: Option<String>,

    /// The target sends back what it gets over TCP.
    #[arg(long)]
    echo: bool,

    /// Levels to test [default: all].
    #[arg(long, value_enum, value_name = "LEVEL", value_delimiter = ',')]
    level: Vec<Layer>,

    /// Only cases whose id contains this, or the case =ID; repeat it for more.
    #[arg(long, value_name = "PART")]
    only: Vec<String>,

    /// Play cases that may trouble other users of the target, too.
    #[arg(long)]
    aggressive: bool,

    /// Most connections at a time.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: u16,

    /// How long to wait for a client to connect, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u16).range(1..=600))]
    wait: u16,

    /// EID of the target.
    #[arg(long, value_name = "EID", default_value = guest_driver::socket::DEFAULT_EID)]
    eid: String,

    /// System EID of the target.
    #[arg(long, value_name = "EID")]
    seid: Option<String>,

    /// A virtio-ism device for the suite, on a fabric of the target: a socket of the daemon, a PCI
    /// device of this virtual machine, or "none".
    #[arg(long, value_name = "DEVICE", default_value = "none")]
    device: PathBuf,

    /// An RDMA device for the suite's links of SMC-R, which has the address of the connection: its
    /// name, "any", or "none".
    #[arg(long, value_name = "DEVICE", default_value = "none")]
    rnic: String,

    /// CHID that is proposed without a device, hex.
    #[arg(long, value_name = "CHID", default_value = "ff00", value_parser = parse_chid)]
    chid: u16,

    /// Subnet of the connection, for version 1 [default: 24 bits of the own address].
    #[arg(long, value_name = "ADDRESS/BITS", value_parser = parse_subnet)]
    subnet: Option<([u8; 4], u8)>,

    /// A prefix of IPv6 of the target, for version 1 [default: 64 bits of the own address].
    #[arg(long, value_name = "ADDRESS/BITS", value_parser = parse_prefix)]
    prefix: Option<([u8; 16], u8)>,

    /// A directory with cases; a file replaces that of the same name.
    #[arg(long, value_name = "DIR")]
    cases: Option<PathBuf>,

    /// Print the cases instead of playing them.
    #[arg(long)]
    list: bool,

    /// Name cases that passed in the text, too.
    #[arg(long)]
    all: bool,

    /// Write the report as JSON; "-" is standard output, instead of the text.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write the report as JUnit XML.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,

    /// Write the report as KTAP, the form of tests of the Linux kernel.
    #[arg(long, value_name = "FILE")]
    ktap: Option<PathBuf>,

    /// Write the report as a page of HTML.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Write the connections of each case as packets to a file in this directory.
    #[arg(long, value_name = "DIR")]
    pcap: Option<PathBuf>,

    /// Compare two reports in JSON instead of playing; the exit status 1 says that a MUST fails in
    /// the second one only.
    #[arg(long, num_args = 2, value_names = ["EARLIER", "LATER"],
          conflicts_with_all = ["server", "listen", "list"])]
    compare: Vec<PathBuf>,
}

/// Plays the cases. The exit status says whether a MUST failed.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run(args: &ConformArgs) -> Result<ExitCode, CliError> {
    match conform(args) {
        Ok(failed) => Ok(ExitCode::from(u8::from(failed))),
        Err(error @ CliError::Output(_)) => Err(error),
        Err(error) => {
            error.show();
            Ok(ExitCode::from(2))
        }
    }
}

fn conform(args: &ConformArgs) -> Result<bool, CliError> {
    if let [earlier, later] = args.compare.as_slice() {
        return compare(earlier, later);
    }
    let cases = Cases::load(args.cases.as_deref()).map_err(CliError::Conform)?;
    if args.list {
        list(&cases)?;
        return Ok(false);
    }
    let files = ReportFiles::open(args)?;
    for name in [Some(&args.eid), args.seid.as_ref()].into_iter().flatten() {
        Eid::new(name).map_err(|why| CliError::Eid { name: name.clone(), why: why.to_string() })?;
    }
    let discovery = discovery(args);
    let (target, described, address) = target(args, discovery.as_ref().ok())?;
    let device = device(args)?;
    let fabric = device.as_ref().map(OnFabric::new);
    let rdma = rdma(args, address)?;
    let announced = discovery.as_ref().ok().map(OptionClient::new);
    let options = Options {
        target,
        echo: args.echo,
        aggressive: args.aggressive,
        connections: usize::from(args.connections),
        wait: Duration::from_secs(args.wait.into()),
        time_factor: TIME_FACTOR,
        only: args.only.clone(),
        layers: layers(args).iter().map(|layer| layer.name().to_owned()).collect(),
        fabric: fabric.as_ref().map(|fabric| fabric as &dyn Fabric),
        rdma: rdma.as_ref().map(|rdma| rdma as &dyn RdmaDevice),
        announce: announced.as_ref().map(|announced| announced as &dyn Announce),
        names: names(args, fabric.as_ref(), rdma.as_ref(), address),
    };
    let began = SystemTime::now();
    let bar = progress_bar();
    let first = Mutex::new(Some(note_silence(bar.clone())));
    let progress = |progress: smc_conform::RunStatus<'_>| {
        drop(first.lock().unwrap_or_else(|lost| lost.into_inner()).take());
        bar.set_length(progress.of as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.last.case.id.clone());
    };
    let played = smc_conform::run(&cases, &options, &progress);
    drop(first);
    bar.finish_and_clear();
    let results = played.map_err(CliError::Conform)?;
    let about = RunHeader {
        program: format!("smc conform {}", env!("CARGO_PKG_VERSION")),
        command: command_line(std::env::args().skip(1)),
        again: again(std::env::args().skip(1)),
        target: described,
        began,
        not_tried: not_tried(args, discovery.err()),
    };
    if let Some(directory) = &args.pcap {
        let written =
            captures::write(directory, &results.results, args.server.is_some(), about.began);
        written.map_err(CliError::io(format!("cannot write to {}", directory.display())))?;
    }
    files.write(&Report { results: &results, about: &about }, args.all)?;
    Ok(results.failed_musts() > 0)
}

/// Compares two reports. Returns whether a MUST fails in the later one only.
fn compare(earlier: &Path, later: &Path) -> Result<bool, CliError> {
    let read = |path: &Path| {
        std::fs::read_to_string(path)
            .map_err(CliError::io(format!("cannot read {}", path.display())))
    };
    let found = smc_conform::compare(&read(earlier)?, &read(later)?);
    let found = found.map_err(|why| CliError::Compare {
        earlier: earlier.to_owned(),
        later: later.to_owned(),
        why,
    })?;
    output::print(&found.text)?;
    Ok(found.new_failures > 0)
}

/// Says after a while that the target may be silent. The suite gives a silent one much time for its first
/// answer. Dropping the result ends the wait.
fn note_silence(bar: ProgressBar) -> mpsc::Sender<()> {
    const SILENCE: Duration = Duration::from_secs(3);
    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        if ended.recv_timeout(SILENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
            let says = "still finding out whether the target speaks SMC; a silent one gets 32 s";
            bar.suspend(|| output::note(says));
        }
    });
    sender
}

fn layers(args: &ConformArgs) -> Vec<Layer> {
    match args.level.as_slice() {
        [] => vec![Layer::Clc, Layer::Llc, Layer::Cdc, Layer::Option],
        some => some.to_vec(),
    }
}

/// The target, its description, and the own address towards it. A listener answers TCP option 254
/// if there is a `discovery`.
fn target(
    args: &ConformArgs,
    discovery: Option<&PeerDiscovery>,
) -> Result<(Target, String, IpAddr), CliError> {
    if let Some(server) = &args.server {
        let server = parse_server(server)?;
        let address = *server.resolve()?.first().ok_or(CliError::Unknown {
            host: server.host.clone(),
            why: "it has no address".into(),
        })?;
        return Ok((Target::Server(address), server.to_string(), own_address(address)));
    }
    let text = args.listen.clone().unwrap_or_default();
    let failed = |source| CliError::Listen { address: text.clone(), source };
    let addresses = match &args.run {
        // The program is on this machine.
        Some(_) => vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        None => parse_listen(&text)?,
    };
    let listener = match (discovery, addresses.first()) {
        (Some(discovery), Some(address)) => discovery.bind(address),
        _ => TcpListener::bind(&addresses[..]),
    };
    let listener = listener.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    if args.run.is_none() {
        output::note(&format!("listening on {address}"));
    }
    let described = args.run.clone().unwrap_or_else(|| format!("clients of {address}"));
    Ok((Target::Client { listener, program: args.run.clone() }, described, address.ip()))
}

/// The source address of packets to the server.
fn own_address(server: SocketAddr) -> IpAddr {
    let any: SocketAddr = match server {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    let found = UdpSocket::bind(any).and_then(|socket| {
        socket.connect(server)?;
        socket.local_addr()
    });
    found.map_or(any.ip(), |address| address.ip())
}

fn device(args: &ConformArgs) -> Result<Option<Arc<IsmDevice>>, CliError> {
    if crate::stack::is_none(&args.device) {
        return Ok(None);
    }
    let opened = device::open(&args.device);
    opened.map(Some).map_err(|source| CliError::Device { device: args.device.clone(), source })
}

/// The RNIC for links of SMC-R.
fn rdma(args: &ConformArgs, address: IpAddr) -> Result<Option<Rnic>, CliError> {
    match args.rnic.as_str() {
        "none" => Ok(None),
        name => Rnic::open(name, address)
            .map(Some)
            .map_err(|why| CliError::ConformRnic { name: name.to_owned(), why }),
    }
}

/// The means to connect and listen with TCP option 254, if the level is wanted and possible.
fn discovery(args: &ConformArgs) -> Result<PeerDiscovery, String> {
    if !layers(args).contains(&Layer::Option) {
        return Err("the level was not asked for".into());
    }
    if args.run.is_some() {
        return Err("the suite has no cases of it for clients that it starts".into());
    }
    let discovery = PeerDiscovery::open(Mode::Auto, RendezvousOptions::default());
    match discovery.unavailable() {
        Some(why) => Err(why.to_string()),
        None => Ok(discovery),
    }
}

fn names(
    args: &ConformArgs,
    fabric: Option<&OnFabric>,
    rdma: Option<&Rnic>,
    address: IpAddr,
) -> Names {
    let (chid, gid) = match fabric {
        Some(fabric) => (fabric.chid(), fabric.gid()),
        None => (args.chid, *uuid::Uuid::new_v4().as_bytes()),
    };
    let (roce_gid, network) = match address {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            (v4.to_ipv6_mapped().octets(), [a, b, c, 0])
        }
        IpAddr::V6(v6) => (v6.octets(), [0; 4]),
    };
    let random = *uuid::Uuid::new_v4().as_bytes();
    let [a, b, c, d, e, ..] = random;
    // Locally administered, and not a group address.
    let mac = rdma.map_or([2, a, b, c, d, e], RdmaDevice::mac);
    let roce_gid = rdma.map_or(roce_gid, RdmaDevice::gid);
    let own_prefix = match address {
        IpAddr::V6(v6) if !v6.is_unspecified() => Some(prefix(v6, 64)),
        _ => None,
    };
    Names {
        eid: args.eid.clone(),
        seid: args.seid.clone(),
        chid,
        gid,
        mac,
        roce_gid,
        subnet: args.subnet.unwrap_or((network, 24)),
        prefix: args.prefix.or(own_prefix),
    }
}

fn not_tried(args: &ConformArgs, no_option: Option<String>) -> Vec<(String, String)> {
    let mut all = vec![(
        "A second link of SMC-R beyond its offer".to_owned(),
        "the suite has one RNIC".to_owned(),
    )];
    match no_option {
        Some(why) => all.push(("TCP option 254".to_owned(), why)),
        None if args.server.is_none() => {
            let why = "the suite answers it, and has no other cases of it for clients";
            all.push(("TCP option 254".to_owned(), why.to_owned()));
        }
        None => {}
    }
    if !args.aggressive {
        let why = "without --aggressive; they are listed as not observable";
        all.push(("Cases that may trouble others".to_owned(), why.to_owned()));
    }
    all
}

fn list(cases: &Cases) -> Result<(), CliError> {
    let lines = cases.cases.iter().map(|case| {
        let rules = case.rules.join(" ");
        format!("{} [{}; {rules}]\n    {}\n", case.id, case.level.name(), case.title)
    });
    output::print(&lines.collect::<String>())
}

fn progress_bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0);
    let template = "{pos:>4}/{len} {wide_bar} {elapsed} {msg:48!}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

/// A command line of this program, quoted for the shell.
fn command_line(arguments: impl Iterator<Item = String>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,".contains(c);
    let quoted = arguments.map(|argument| match argument {
        argument if !argument.is_empty() && argument.chars().all(is_plain) => argument,
        argument => format!("'{}'", argument.replace('\'', "'\\''")),
    });
    std::iter::once("smc".to_owned()).chain(quoted).collect::<Vec<_>>().join(" ")
}

/// The command line to play one case again, up to the id: without other cases and without files of
/// reports.
fn again(arguments: impl Iterator<Item = String>) -> String {
    let mut left = Vec::new();
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--all" => {}
            "--only" | "--json" | "--junit" | "--ktap" | "--html" | "--pcap" => {
                drop(arguments.next())
            }
            one if ["--only=", "--json=", "--junit=", "--ktap=", "--html=", "--pcap="]
                .iter()
                .any(|option| one.starts_with(option)) => {}
            _ => left.push(argument),
        }
    }
    format!("{} --only ", command_line(left.into_iter()))
}

fn parse_chid(text: &str) -> Result<u16, String> {
    let digits = text.trim_start_matches("0x");
    u16::from_str_radix(digits, 16).map_err(|_| format!("{text:?} is no CHID; example: ff00"))
}

fn parse_subnet(text: &str) -> Result<([u8; 4], u8), String> {
    let parsed = text.split_once('/').and_then(|(address, bits)| {
        let address: std::net::Ipv4Addr = address.parse().ok()?;
        let bits: u8 = bits.parse().ok().filter(|bits| *bits <= 32)?;
        let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
        Some(((u32::from(address) & mask).to_be_bytes(), bits))
    });
    parsed.ok_or_else(|| format!("{text:?} is no subnet; example: 10.9.0.0/24"))
}

fn parse_prefix(text: &str) -> Result<([u8; 16], u8), String> {
    let parsed = text.split_once('/').and_then(|(address, bits)| {
        let address: Ipv6Addr = address.parse().ok()?;
        Some(prefix(address, bits.parse().ok().filter(|bits| *bits <= 128)?))
    });
    parsed.ok_or_else(|| format!("{text:?} is no prefix of IPv6; example: fd00:1::/64"))
}

/// The first bits of an address, the others zero.
fn prefix(address: Ipv6Addr, bits: u8) -> ([u8; 16], u8) {
    let others = 128_u32.saturating_sub(u32::from(bits));
    let mask = u128::MAX.checked_shl(others).unwrap_or(0);
    ((address.to_bits() & mask).to_be_bytes(), bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_and_chids_are_read() {
        assert_eq!(parse_subnet("10.9.0.77/24"), Ok(([10, 9, 0, 0], 24)));
        assert_eq!(parse_subnet("10.9.0.77/0"), Ok(([0; 4], 0)));
        for bad in ["10.9.0.0", "10.9.0/8", "10.9.0.0/33", "x/1"] {
            assert!(parse_subnet(bad).is_err(), "{bad}");
        }
        let long = parse_prefix("fd00:1::77/64").unwrap();
        assert_eq!(long, (Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0).octets(), 64));
        assert_eq!(parse_prefix("fd00::1/0"), Ok(([0; 16], 0)));
        for bad in ["fd00::1", "10.9.0.0/24", "fd00::/129"] {
            assert!(parse_prefix(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_chid("0xff01"), Ok(0xff01));
        assert!(parse_chid("x").is_err());
    }
    #[test]
    fn a_case_is_played_again_without_other_cases_and_reports() {
        let words =
            "conform --echo --json - --only server --all --html=a.html --pcap p --run {x} db:5000";
        let again = again(words.split(' ').map(str::to_owned));
        assert_eq!(again, "smc conform --echo --run '{x}' db:5000 --only ");
    }
}
