// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The steps of a check.

use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use guest_driver::socket::show_gid;
use guest_driver::statistics::Reason;
use guest_driver::{Config, ConnectionInfo, Fallback, Rnics, SmcStream, Stack};
use smc_core::handshake::FallbackReason;
use smc_rendezvous::{ClientAction, Mode, TcpReason};
use socket2::{Domain, Protocol, Socket, Type};

use super::report::{Outcome, StepReport, StepStatus};
use super::{CheckArgs, Propose};
use crate::address::Server;
use crate::error::{CliError, without_path};
use crate::paths;
use crate::stack::RendezvousArg;

/// How long the server may take to close its end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Limit of the trailing bytes from a server.
const MAX_TRAILING: usize = 1 << 20;

/// Runs all steps.
///
/// # Errors
/// An option has a wrong value, or standard output cannot be written.
pub(super) fn all(
    args: &CheckArgs,
    server: &Server,
    report: &mut StepReport,
) -> Result<Outcome, CliError> {
    let (mut config, device) = args.stack.config(paths::CLIENT)?;
    if args.stack.rendezvous.is_none() {
        config.rendezvous = Mode::Auto;
    }
    let addresses = match server.resolve() {
        Ok(addresses) => addresses,
        Err(error) => {
            report.step("name", StepStatus::No, error.to_string())?;
            return Ok(Outcome::None);
        }
    };
    let list: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    report.step("name", StepStatus::Ok, format!("{} is {}", server.host, list.join(", ")))?;
    let stack = offer(config, &device, args.step_timeout(), report)?;
    let (outcome, answered) = match connect(&stack, &addresses, args, report)? {
        None => (Outcome::None, None),
        Some((tcp, answered)) => (shake_hands(&stack, tcp, answered, args, report)?, answered),
    };
    let says = match outcome {
        Outcome::Smc => "a connection would be SMC",
        Outcome::Tcp => "a connection would be TCP",
        Outcome::None => "there is no connection",
        Outcome::Unknown if answered.is_none() => {
            "not known: this end cannot ask the server; \"--propose always\" tries it"
        }
        Outcome::Unknown => {
            "clients that ask by TCP option 254 would be TCP; \"smc connect\" and clients that --peer \
             names the server to do not ask, and for them it is not known"
        }
    };
    let status = match outcome {
        Outcome::Smc => StepStatus::Ok,
        Outcome::Tcp | Outcome::None => StepStatus::No,
        Outcome::Unknown => StepStatus::Unknown,
    };
    report.step("result", status, says)?;
    Ok(outcome)
}

/// Opens the local devices and RNICs to offer.
fn offer(
    mut config: Config,
    device: &Path,
    timeout: Duration,
    report: &mut StepReport,
) -> Result<Arc<Stack>, CliError> {
    config.clc_timeout = timeout;
    let stack = match open(config.clone(), timeout) {
        Ok(stack) => stack,
        Err(why) => {
            let says = format!("{}: {}", device.display(), without_path(device, &why));
            report.step("device", StepStatus::No, says)?;
            // Like a program without the device: with RNICs, or with nothing.
            let without = Config { devices: Vec::new(), ..config };
            let nothing = Config { rnics: Rnics::None, ..without.clone() };
            let opened = open(without, timeout).or_else(|_| open(nothing, timeout));
            opened.map_err(|why| CliError::Usage(format!("no SMC at all: {why}")))?
        }
    };
    let process = stack.report();
    for device in &process.devices {
        match (&device.chid, &device.gid, &device.problem) {
            (Some(chid), Some(gid), _) => {
                let says = format!("{}: fabric {chid}, GID {gid}", device.path);
                report.step("device", StepStatus::Ok, says)?;
            }
            (.., problem) => {
                let why = problem.as_deref().unwrap_or("not open");
                report.step("device", StepStatus::No, format!("{}: {why}", device.path))?;
            }
        }
    }
    for rnic in &process.rnics {
        let netdev = rnic.netdev.as_deref().unwrap_or("no interface");
        let state = if rnic.active { "active" } else { "down" };
        let gids: Vec<_> = rnic.gids.iter().map(|gid| show_gid(*gid)).collect();
        let says = format!("{} on {netdev}, {state}, GIDs {}", rnic.full_name(), gids.join(" "));
        report.step("rnic", if rnic.active { StepStatus::Ok } else { StepStatus::No }, says)?;
    }
    if let Some(why) = &process.no_rdma {
        report.step("rnic", StepStatus::No, format!("no SMC-R: {why}"))?;
    }
    Ok(stack)
}

/// Opens a stack. Waits half of the time for a device in use by another process.
fn open(mut config: Config, timeout: Duration) -> Result<Arc<Stack>, String> {
    config.device_timeout = timeout / 2;
    let (done, opened) = channel();
    std::thread::spawn(move || done.send(Stack::open(config)));
    match opened.recv_timeout(timeout) {
        Ok(Ok(stack)) => Ok(stack),
        Ok(Err(error)) if error.kind() == io::ErrorKind::ResourceBusy => {
            Err("another process uses it: name a free one with --device".into())
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("it does not answer within {timeout:?}")),
    }
}

/// A TCP connection, and whether the server answered the option, if known.
fn connect(
    stack: &Arc<Stack>,
    addresses: &[SocketAddr],
    args: &CheckArgs,
    report: &mut StepReport,
) -> Result<Option<(TcpStream, Option<bool>)>, CliError> {
    for address in addresses {
        let (tcp, asked) = match dial(stack, address, args.step_timeout()) {
            Ok(connected) => connected,
            Err(error) => {
                report.step("tcp", StepStatus::No, format!("{address}: {error}"))?;
                continue;
            }
        };
        let from = tcp.local_addr().map_or_else(|_| "?".into(), |local| local.to_string());
        report.step("tcp", StepStatus::Ok, format!("{from} -> {address}"))?;
        let answered = option(stack, asked, args.stack.rendezvous, report)?;
        return Ok(Some((tcp, answered)));
    }
    Ok(None)
}

fn dial(
    stack: &Arc<Stack>,
    address: &SocketAddr,
    timeout: Duration,
) -> io::Result<(TcpStream, ClientAction)> {
    let socket = Socket::new(Domain::for_address(*address), Type::STREAM, Some(Protocol::TCP))?;
    let asked = stack.peer_discovery().before_connect(&socket, address);
    socket.connect_timeout(&(*address).into(), timeout)?;
    let answer = stack.peer_discovery().connected(&socket, asked);
    Ok((socket.into(), answer))
}

fn option(
    stack: &Arc<Stack>,
    answer: ClientAction,
    rendezvous: Option<RendezvousArg>,
    report: &mut StepReport,
) -> Result<Option<bool>, CliError> {
    let (status, answered, says) = match answer {
        ClientAction::Propose { awaited: true } => (
            StepStatus::Ok,
            Some(true),
            "the server answered TCP option 254: it speaks SMC".to_owned(),
        ),
        ClientAction::UseTcp(TcpReason::NotAnswered) => {
            let says =
                "the server did not answer TCP option 254: clients that use the option stay on TCP";
            (StepStatus::No, Some(false), says.to_owned())
        }
        ClientAction::UseTcp(TcpReason::Policy) => {
            report.reason = Some(Reason::of(&Fallback::Policy));
            let says = "the policy selects TCP, so this end did not send the option";
            (StepStatus::No, None, says.to_owned())
        }
        ClientAction::Propose { awaited: false } if rendezvous == Some(RendezvousArg::Off) => {
            (StepStatus::Unknown, None, "this end does not ask (--rendezvous off)".to_owned())
        }
        ClientAction::UseTcp(TcpReason::Unavailable) | ClientAction::Propose { awaited: false } => {
            let why = stack.peer_discovery().unavailable().map(ToString::to_string);
            let why = why.unwrap_or_else(|| "the kernel refused the socket".into());
            (StepStatus::Unknown, None, format!("not known: {why}"))
        }
    };
    report.step("option", status, says)?;
    Ok(answered)
}

fn shake_hands(
    stack: &Arc<Stack>,
    tcp: TcpStream,
    answered: Option<bool>,
    args: &CheckArgs,
    report: &mut StepReport,
) -> Result<Outcome, CliError> {
    if !args.propose.tries(answered) {
        let (why, outcome) = match answered {
            Some(false) if args.propose == Propose::Auto => {
                (Fallback::from(FallbackReason::PeerNotSmc), Outcome::Unknown)
            }
            Some(false) => (Fallback::from(FallbackReason::PeerNotSmc), Outcome::Tcp),
            _ if report.reason.is_some() => (Fallback::Policy, Outcome::Tcp),
            _ => {
                let why = "whether the server speaks SMC is not known";
                (Fallback::NoRendezvous(why.into()), Outcome::Unknown)
            }
        };
        let says = match answered {
            Some(false) => {
                "not tried: the server did not answer the option (--propose always tries)"
            }
            _ => "not tried: whether the server speaks SMC is not known (--propose always tries)",
        };
        report.step("handshake", StepStatus::Unknown, says)?;
        report.reason = Some(Reason::of(&why));
        let _ = tcp.shutdown(Shutdown::Both);
        return Ok(outcome);
    }
    let stream = match SmcStream::upgrade(stack, tcp, Some(Instant::now() + args.step_timeout())) {
        Ok(stream) => stream,
        Err(error) => {
            let says = match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    "the server does not answer the Proposal: it is an ordinary TCP server. Do not \
                     configure clients to use SMC with it"
                        .into()
                }
                _ => format!("it broke the connection: {error}"),
            };
            report.step("handshake", StepStatus::No, says)?;
            return Ok(Outcome::None);
        }
    };
    let outcome = describe(stack, &stream, report)?;
    close(stack, stream);
    Ok(outcome)
}

/// Reports the agreement of both ends.
fn describe(
    stack: &Stack,
    stream: &SmcStream,
    report: &mut StepReport,
) -> Result<Outcome, CliError> {
    let info = stream.info();
    if let ConnectionInfo::Tcp(why) = &info {
        let reason = Reason::of(why);
        let Reason { code, name, advice, .. } = &reason;
        let says = match why {
            // A Decline contains only the code.
            Fallback::Handshake(FallbackReason::DeclinedByPeer(code)) => {
                format!("the server declined: {code}")
            }
            Fallback::Handshake(FallbackReason::DeclinedHere(why)) => {
                format!("this end declined: {why} (0x{code:08x} {name})")
            }
            Fallback::Handshake(why) => why.to_string(),
            _ => format!("nothing was offered: {why} (0x{code:08x} {name}: {advice})"),
        };
        report.step("handshake", StepStatus::No, says)?;
        report.reason = Some(reason);
        return Ok(Outcome::Tcp);
    }
    let (contact, buffers, host) = match &info {
        ConnectionInfo::Smcd(d) => (d.first_contact, (d.local_buffer, d.peer_buffer), &d.peer_host),
        ConnectionInfo::Smcr(r) => (r.first_contact, (r.local_buffer, r.peer_buffer), &r.peer_host),
        ConnectionInfo::Tcp(_) => (false, (0, 0), &None),
    };
    let contact = if contact { "first contact" } else { "known peer" };
    let host = host.as_ref().map(|host| format!(", host {host}")).unwrap_or_default();
    let (here, there) = buffers;
    let says = format!("{info}, {contact}, buffers of {here} and {there} bytes{host}");
    report.step("handshake", StepStatus::Ok, says)?;
    let mine = (stream.local_addr().ok(), stream.peer_addr().ok());
    let connections = stack.report().connections;
    report.connection = connections.into_iter().find(|found| (found.local, found.peer) == mine);
    Ok(Outcome::Smc)
}

/// Closes the connection, and waits a moment until the server has closed its end.
fn close(stack: &Stack, stream: SmcStream) {
    let end = Instant::now() + CLOSE_TIMEOUT;
    let _ = stream.set_linger(Some(CLOSE_TIMEOUT));
    let _ = stream.shutdown(Shutdown::Write);
    let mut sink = [0u8; 4096];
    let mut total = 0;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || total > MAX_TRAILING {
            break;
        }
        let _ = stream.set_read_timeout(Some(left));
        match (&stream).read(&mut sink) {
            Ok(n) if n > 0 => total += n,
            _ => break,
        }
    }
    drop(stream);
    while stack.totals().closing > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
}
