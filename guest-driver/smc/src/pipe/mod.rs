// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc listen` and `smc connect`: a netcat over SMC.

mod echo;
mod pump;

use std::time::Duration;

use clap::Args;
use guest_driver::{ConnectionInfo, SmcListener, SmcStream};

use crate::address::{ServerArgs, parse_listen};
use crate::error::CliError;
use crate::stack::StackArgs;
use crate::{output, paths};

/// Help of `smc listen`.
pub(crate) const LISTEN: &str = "\
Waits for a connection over SMC-D; then standard input goes to the peer and what the peer sends goes
to standard output. At the end of the input it closes its direction of the connection. It ends when
both directions are closed. If the connection ends before the input does, or before the other end
has read everything, that is an error, which says how much was sent.

A connection that stays on TCP, because the client does not speak SMC or the handshake fails, is
closed unless --tcp-ok is given.";

/// Help of `smc connect`.
pub(crate) const CONNECT: &str = "\
Connects over SMC-D to a server that speaks it (\"smc listen\", or any program with an SmcListener);
then standard input goes to the peer and what the peer sends goes to standard output. At the end of
the input it closes its direction of the connection. It ends when both directions are closed. If the
connection ends before the input does, or before the server has read everything, that is an error,
which says how much was sent.

Do not connect to an ordinary TCP server: it would take the SMC handshake for data.";

/// End of the help of `smc listen`.
pub(crate) const LISTEN_AFTER: &str = "\
Examples:
  smc listen 5000 > copy                    take a file
  smc listen -v 127.0.0.1:5000 < file       give one
  smc listen --keep --tcp-ok 5000           serve clients one after the other, SMC or not
  smc listen --echo --tcp-ok 5000           send back what comes, as a target of a conformance test
  tar c dir | smc listen 5000               give the output of a program";

/// End of the help of `smc connect`.
pub(crate) const CONNECT_AFTER: &str = "\
Examples:
  smc connect localhost:5000 < file
  smc connect -v --device /run/ism/vm2.sock vm1:5000 | tar x";

/// How long the end of a connection waits for the peer to read the rest. This process may end next,
/// and unread bytes would be lost.
const LINGER: Duration = Duration::from_secs(60);

/// Options of `smc listen`.
#[derive(Args, Debug)]
pub(crate) struct ListenArgs {
    /// Where to listen: HOST:PORT, or a port on all addresses; port 0 is any free port (-v prints it).
    #[arg(value_name = "[HOST:]PORT")]
    address: String,

    /// Take the next connection when one has ended, for ever.
    #[arg(long, short)]
    keep: bool,

    /// Send back to each client what it sends, for ever and for many clients at a time, instead of
    /// standard input and output.
    #[arg(long, conflicts_with = "keep")]
    echo: bool,

    #[command(flatten)]
    common: Common,
}

/// Options of `smc connect`.
#[derive(Args, Debug)]
pub(crate) struct ConnectArgs {
    #[command(flatten)]
    server: ServerArgs,

    /// Send back what the server sends, instead of standard input and output.
    #[arg(long)]
    echo: bool,

    #[command(flatten)]
    common: Common,
}

#[derive(Args, Debug)]
struct Common {
    /// Accept a connection that stays on TCP.
    #[arg(long)]
    tcp_ok: bool,

    /// Print on standard error what was negotiated, and how many bytes were sent and received.
    #[arg(long, short)]
    verbose: bool,

    #[command(flatten)]
    stack: StackArgs,
}

/// Serves one client, or many one after the other.
///
/// # Errors
/// No device, no address, or a failed connection (with `--keep` such errors are only printed).
pub(crate) fn listen(args: &ListenArgs) -> Result<(), CliError> {
    let addresses = parse_listen(&args.address)?;
    let stack = args.common.stack.open(paths::SERVER)?;
    let failed = |source| CliError::Listen { address: args.address.clone(), source };
    let listener = SmcListener::bind(&stack, &addresses[..]).map_err(failed)?;
    if args.common.verbose {
        let address = listener.local_addr().map_err(failed)?;
        output::note(&format!("listening on {address}"));
    }
    loop {
        let (stream, peer) = listener.accept().map_err(failed)?;
        if args.echo {
            echo::start(stream, peer.to_string(), args.common.tcp_ok, args.common.verbose);
            continue;
        }
        let result = serve(&stream, &peer.to_string(), &args.common);
        match result {
            Err(error) if args.keep => output::note(&format!("smc: {error}")),
            result if !args.keep => return result,
            _ => {}
        }
    }
}

/// Talks to a server.
///
/// # Errors
/// No device, no server, or a failed connection.
pub(crate) fn connect(args: &ConnectArgs) -> Result<(), CliError> {
    let server = args.server.server()?;
    let addresses = server.resolve()?;
    let stack = args.common.stack.open(paths::CLIENT)?;
    let peer = server.to_string();
    let stream = SmcStream::connect(&stack, &addresses[..])
        .map_err(|source| CliError::Connect { address: peer.clone(), source })?;
    match args.echo {
        true => echo::once(&stream, &peer, args.common.tcp_ok, args.common.verbose),
        false => serve(&stream, &peer, &args.common),
    }
}

fn serve(stream: &SmcStream, peer: &str, common: &Common) -> Result<(), CliError> {
    let info = stream.info();
    if common.verbose {
        output::note(&format!("{peer}: {info}"));
        if let ConnectionInfo::Smcd(info) = &info {
            let contact = if info.first_contact { "first contact" } else { "known peer" };
            output::note(&format!(
                "{peer}: {contact}, buffers of {} bytes here and {} bytes there{}",
                info.local_buffer,
                info.peer_buffer,
                info.peer_host.as_ref().map(|host| format!(", host {host}")).unwrap_or_default(),
            ));
        }
    }
    if let ConnectionInfo::Tcp(why) = info
        && !common.tcp_ok
    {
        return Err(CliError::NotSmc { why: why.to_string() });
    }
    let failed = |source| CliError::Transfer { peer: peer.into(), source };
    stream.set_linger(Some(LINGER)).map_err(failed)?;
    let moved = pump::both_ways(stream, LINGER).map_err(failed)?;
    if common.verbose {
        output::note(&format!(
            "{peer}: {} bytes sent, {} bytes received",
            moved.sent, moved.received
        ));
    }
    Ok(())
}
