// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server of a measurement, doing the runs requested by clients.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::control::Control;
use super::request::Request;
use super::{Hello, Own, ServerMessage, TIMEOUT, VERSION, limit, processors};
use crate::address::parse_listen;
use crate::error::CliError;
use crate::helper::Helper;
use crate::perf::job::RunMessage;
use crate::perf::memory;
use crate::transport::{ANY_CID, Transport, Vsock};

/// How long a client may be silent before it asks for its next run.
const IDLE: Duration = Duration::from_secs(120);
/// How often to check, during a run, whether the client is still connected.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Pause after a failure to accept. The cause may last (no descriptors).
const PAUSE: Duration = Duration::from_secs(1);

/// Serves clients, one after the other, until the process is ended.
///
/// # Errors
/// The device cannot be opened, or the address not be listened on.
pub(in crate::perf) fn serve(address: &str, own: &Own) -> Result<(), CliError> {
    let failed = |source| CliError::Listen { address: address.into(), source };
    let addresses = parse_listen(address)?;
    memory::probe(&own.device, TIMEOUT)?;
    let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
    let local = listener.local_addr().map_err(failed)?;
    crate::output::note(&format!(
        "serving measurements on {local}, device {}",
        own.device.display()
    ));
    loop {
        match listener.accept() {
            Ok((stream, peer)) => match client(stream, own) {
                Ok(runs) => tracing::info!(%peer, runs, "measured"),
                Err(error) => crate::output::note(&format!("smc: {peer}: {error}")),
            },
            Err(error) => {
                crate::output::note(&format!("smc: accept: {error}"));
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Serves one client until the client leaves. Returns the number of requested runs.
fn client(stream: TcpStream, own: &Own) -> io::Result<u64> {
    let mut control = Control::new(stream)?;
    let vsock = Vsock { cid: ANY_CID }.listen().is_ok();
    control.send(&ServerMessage::Hello(Hello {
        version: VERSION,
        vsock,
        processors: processors(),
    }))?;
    for runs in 0.. {
        let request = match control.receive::<Request>(IDLE) {
            Ok(Some(request)) => request,
            Ok(None) => return Err(io::Error::new(io::ErrorKind::TimedOut, "requests nothing")),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(runs),
            Err(error) => {
                let _ = control.send(&ServerMessage::Error(format!("not a request: {error}")));
                return Err(error);
            }
        };
        if let Some(problem) = run(&mut control, &request, own)? {
            tracing::warn!(problem, "a run failed");
            control.send(&ServerMessage::Error(problem))?;
        }
    }
    Ok(u64::MAX)
}

/// Does one run; `Some` is the reason for a failure.
///
/// # Errors
/// The client is gone, or sent something unexpected.
fn run(control: &mut Control, request: &Request, own: &Own) -> io::Result<Option<String>> {
    // The client has reached this address, so its connections of runs will.
    let mut bind = control.local()?;
    bind.set_port(0);
    let job = match request.job(own, bind, String::new()) {
        Ok(job) => job,
        Err(refused) => return Ok(Some(format!("refused: {refused}"))),
    };
    let helper = match Helper::start("server", "__serve", &job) {
        Ok(helper) => helper,
        Err(error) => return Ok(Some(error.to_string())),
    };
    let deadline = Instant::now() + TIMEOUT + limit(request.seconds());
    loop {
        match helper.try_receive(CHECK_INTERVAL) {
            Ok(Some(RunMessage::Listening(address))) => match port(&address) {
                Some(port) => control.send(&ServerMessage::Listening { port })?,
                None => return Ok(Some(format!("listens on {address}, which has no port"))),
            },
            Ok(Some(RunMessage::Done(report))) => {
                // The device is free before the next run is asked for.
                drop(helper);
                return control.send(&ServerMessage::Done(report)).map(|()| None);
            }
            Ok(None) if Instant::now() > deadline => {
                return Ok(Some("the run takes too long".into()));
            }
            Ok(None) => match control.receive::<serde_json::Value>(Duration::ZERO) {
                Ok(None) => {}
                Ok(Some(_)) => return Err(io::Error::other("sent a request during a run")),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(io::Error::new(error.kind(), "disconnected during a run"));
                }
                Err(error) => return Err(error),
            },
            Err(error) => return Ok(Some(error.to_string())),
        }
    }
}

/// The number after the last colon.
fn port(address: &str) -> Option<u32> {
    address.rsplit_once(':')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_the_end_of_an_address() {
        assert_eq!(port("10.0.0.1:5000"), Some(5000));
        assert_eq!(port("[fe80::1%2]:7"), Some(7));
        assert_eq!(port("4294967295:3737003263"), Some(3_737_003_263));
        assert_eq!(port("nowhere"), None);
    }
}
