//! The steps, one after the other.

use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use guest_driver::rendezvous::{ClientAction, Mode, TcpReason};
use guest_driver::socket::show_gid;
use guest_driver::statistics::Reason;
use guest_driver::{Config, ConnectionInfo, Fallback, Rnics, SmcStream, Stack};
use smc_core::handshake::FallbackReason;
use socket2::{Domain, Protocol, Socket, Type};

use super::CheckArgs;
use super::tell::{Mark, Outcome, Tell};
use crate::error::CliError;
use crate::places;

/// How long the server may take to close its end.
const GOODBYE: Duration = Duration::from_secs(1);
/// Bytes that a server may still send.
const MAX_FAREWELL: usize = 1 << 20;

/// Goes through them.
///
/// # Errors
/// An option that makes no sense; standard output is gone.
pub(super) fn all(args: &CheckArgs, tell: &mut Tell) -> Result<Outcome, CliError> {
    let (config, device) = args.stack.config(places::CLIENT)?;
    let addresses = match (args.host.as_str(), args.port).to_socket_addrs() {
        Ok(addresses) => addresses.collect::<Vec<_>>(),
        Err(error) => {
            tell.step("name", Mark::No, format!("{} is not known: {error}", args.host))?;
            return Ok(Outcome::None);
        }
    };
    let list: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    tell.step("name", Mark::Ok, format!("{} is {}", args.host, list.join(", ")))?;
    let stack = offer(config, &device, args.patience(), tell)?;
    let outcome = match connect(&stack, &addresses, args, tell)? {
        None => Outcome::None,
        Some((tcp, seen)) => shake_hands(&stack, tcp, seen, args, tell)?,
    };
    let says = match outcome {
        Outcome::Smc => "a connection would be SMC",
        Outcome::Tcp => "a connection would be TCP",
        Outcome::None => "there is no connection",
    };
    let mark = if outcome == Outcome::Smc { Mark::Ok } else { Mark::No };
    tell.step("result", mark, says)?;
    Ok(outcome)
}

/// What this end has.
fn offer(
    mut config: Config,
    device: &Path,
    patience: Duration,
    tell: &mut Tell,
) -> Result<Arc<Stack>, CliError> {
    config.rendezvous = Mode::Auto;
    config.clc_timeout = patience;
    let stack = match open(config.clone(), patience) {
        Ok(stack) => stack,
        Err(why) => {
            let says = format!("{}: {why}", device.display());
            tell.step("device", Mark::No, says)?;
            // As a program that goes on without: it has RNICs, or nothing.
            let without = Config { devices: Vec::new(), ..config };
            let nothing = Config { rnics: Rnics::None, ..without.clone() };
            let opened = open(without, patience).or_else(|_| open(nothing, patience));
            opened.map_err(|why| CliError::Usage(format!("no SMC at all: {why}")))?
        }
    };
    let process = stack.report();
    for device in &process.devices {
        match (&device.chid, &device.gid, &device.problem) {
            (Some(chid), Some(gid), _) => {
                let says = format!("{}: fabric {chid}, GID {gid}", device.path);
                tell.step("device", Mark::Ok, says)?;
            }
            (.., problem) => {
                let why = problem.as_deref().unwrap_or("not open");
                tell.step("device", Mark::No, format!("{}: {why}", device.path))?;
            }
        }
    }
    for rnic in &process.rnics {
        let netdev = rnic.netdev.as_deref().unwrap_or("no interface");
        let state = if rnic.active { "active" } else { "down" };
        let gids: Vec<_> = rnic.gids.iter().map(|gid| show_gid(*gid)).collect();
        let says = format!("{} on {netdev}, {state}, GIDs {}", rnic.full_name(), gids.join(" "));
        tell.step("rnic", if rnic.active { Mark::Ok } else { Mark::No }, says)?;
    }
    if let Some(why) = &process.no_rdma {
        tell.step("rnic", Mark::No, format!("no SMC-R: {why}"))?;
    }
    Ok(stack)
}

/// Opens a stack. A device that another process has lets us wait for ever.
fn open(config: Config, patience: Duration) -> Result<Arc<Stack>, String> {
    let (done, opened) = channel();
    std::thread::spawn(move || done.send(Stack::open(config)));
    match opened.recv_timeout(patience) {
        Ok(Ok(stack)) => Ok(stack),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("another process seems to use it: name a free one with --device".into()),
    }
}

/// A TCP connection, and whether the server answered the option, if that is known.
fn connect(
    stack: &Arc<Stack>,
    addresses: &[SocketAddr],
    args: &CheckArgs,
    tell: &mut Tell,
) -> Result<Option<(TcpStream, Option<bool>)>, CliError> {
    for address in addresses {
        let (tcp, asked) = match dial(stack, address, args.patience()) {
            Ok(connected) => connected,
            Err(error) => {
                tell.step("tcp", Mark::No, format!("{address}: {error}"))?;
                continue;
            }
        };
        let from = tcp.local_addr().map_or_else(|_| "?".into(), |local| local.to_string());
        tell.step("tcp", Mark::Ok, format!("{from} -> {address}"))?;
        let seen = option(stack, asked, tell)?;
        return Ok(Some((tcp, seen)));
    }
    Ok(None)
}

fn dial(
    stack: &Arc<Stack>,
    address: &SocketAddr,
    patience: Duration,
) -> io::Result<(TcpStream, ClientAction)> {
    let socket = Socket::new(Domain::for_address(*address), Type::STREAM, Some(Protocol::TCP))?;
    let asked = stack.peer_discovery().before_connect(&socket, address);
    socket.connect_timeout(&(*address).into(), patience)?;
    let answer = stack.peer_discovery().connected(&socket, asked);
    Ok((socket.into(), answer))
}

fn option(
    stack: &Arc<Stack>,
    answer: ClientAction,
    tell: &mut Tell,
) -> Result<Option<bool>, CliError> {
    let (mark, seen, says) = match answer {
        ClientAction::Propose { awaited: true } => {
            (Mark::Ok, Some(true), "the server answered TCP option 254: it speaks SMC".to_owned())
        }
        ClientAction::UseTcp(TcpReason::NotAnswered) => {
            let says = "the server did not answer TCP option 254: clients that ask stay on TCP";
            (Mark::No, Some(false), says.to_owned())
        }
        ClientAction::UseTcp(TcpReason::Policy) => {
            (Mark::No, None, "the policy says TCP, so it was not asked for".to_owned())
        }
        ClientAction::UseTcp(TcpReason::Unavailable) | ClientAction::Propose { awaited: false } => {
            let why = stack.peer_discovery().unavailable().map(ToString::to_string);
            let why = why.unwrap_or_else(|| "the kernel refused the socket".into());
            (Mark::Unknown, None, format!("not known: {why}"))
        }
    };
    tell.step("option", mark, says)?;
    Ok(seen)
}

fn shake_hands(
    stack: &Arc<Stack>,
    tcp: TcpStream,
    seen: Option<bool>,
    args: &CheckArgs,
    tell: &mut Tell,
) -> Result<Outcome, CliError> {
    if !args.propose.tries(seen) {
        let why = match seen {
            Some(false) => Fallback::from(FallbackReason::PeerNotSmc),
            _ => Fallback::NoRendezvous("whether the server speaks SMC is not known".into()),
        };
        let says = format!("not tried: {why} (--propose always tries)");
        tell.step("handshake", Mark::Unknown, says)?;
        tell.reason = Some(Reason::of(&why));
        let _ = tcp.shutdown(Shutdown::Both);
        return Ok(Outcome::Tcp);
    }
    let stream = match SmcStream::upgrade(stack, tcp, Some(Instant::now() + args.patience())) {
        Ok(stream) => stream,
        Err(error) => {
            let says = match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    "the server does not answer the Proposal: it is an ordinary TCP server, for which \
                     clients must not be told to use SMC"
                        .into()
                }
                _ => format!("it broke the connection: {error}"),
            };
            tell.step("handshake", Mark::No, says)?;
            return Ok(Outcome::None);
        }
    };
    let outcome = describe(stack, &stream, tell)?;
    part(stack, stream);
    Ok(outcome)
}

/// What was agreed on.
fn describe(stack: &Stack, stream: &SmcStream, tell: &mut Tell) -> Result<Outcome, CliError> {
    let info = stream.info();
    if let ConnectionInfo::Tcp(why) = &info {
        let reason = Reason::of(why);
        let Reason { code, name, advice, .. } = &reason;
        let says = match why {
            // The server's code is all that it says.
            Fallback::Handshake(FallbackReason::DeclinedByPeer(code)) => {
                format!("the server declined: {code}")
            }
            Fallback::Handshake(FallbackReason::DeclinedHere(why)) => {
                format!("this end declined: {why} (0x{code:08x} {name})")
            }
            Fallback::Handshake(why) => why.to_string(),
            _ => format!("nothing was offered: {why} (0x{code:08x} {name}: {advice})"),
        };
        tell.step("handshake", Mark::No, says)?;
        tell.reason = Some(reason);
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
    tell.step("handshake", Mark::Ok, says)?;
    let mine = (stream.local_addr().ok(), stream.peer_addr().ok());
    let connections = stack.report().connections;
    tell.connection = connections.into_iter().find(|found| (found.local, found.peer) == mine);
    Ok(Outcome::Smc)
}

/// Closes, and gives the server a moment to do so, too.
fn part(stack: &Stack, stream: SmcStream) {
    let end = Instant::now() + GOODBYE;
    let _ = stream.set_linger(Some(GOODBYE));
    let _ = stream.shutdown(Shutdown::Write);
    let mut sink = [0u8; 4096];
    let mut total = 0;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || total > MAX_FAREWELL {
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
