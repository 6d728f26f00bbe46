// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The client of a measurement, requesting the runs.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use indicatif::ProgressBar;

use super::control::Control;
use super::request::Request;
use super::{Hello, Own, ServerMessage, TIMEOUT, VERSION, limit, processors, report};
use crate::address::parse_server;
use crate::error::CliError;
use crate::helper::Helper;
use crate::perf::job::{RunMessage, TransportKind};
use crate::perf::measure::Experiment;
use crate::perf::memory;
use crate::perf::run::{self, Ends, Plan, Results, Runner, unexpected_report};
use crate::transport::SmcPath;

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(15);
/// How long a server may be busy with another client.
const BUSY: Duration = Duration::from_secs(600);
/// Time until the message about a busy server.
const NOTICE: Duration = Duration::from_secs(3);
/// How long to wait for the server's error after the client's process has failed.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of the shown bytes of a server's error.
const ERROR: usize = 500;

/// A server, and the means of access.
struct RemoteServer {
    control: Control,
    hello: Hello,
    own: Own,
    /// CID of the server.
    vsock: Option<u32>,
}

/// The server to measure with.
#[derive(Debug)]
pub(in crate::perf) struct Target<'a> {
    /// `HOST:PORT` of the control connection.
    pub(in crate::perf) server: &'a str,
    /// The server's CID, if virtio sockets are to be measured too.
    pub(in crate::perf) vsock: Option<u32>,
}

/// Measures all experiments against a server, and prints them. `json`: each at once as a line,
/// instead of a table at the end.
///
/// # Errors
/// The server cannot be reached; a run failed; SMC fell back to TCP.
pub(in crate::perf) fn measure(
    target: &Target<'_>,
    own: Own,
    experiments: &[Experiment],
    plan: &Plan,
    json: bool,
    progress: &ProgressBar,
) -> Result<Vec<Results>, CliError> {
    for experiment in experiments {
        // All requests are checked before the first run.
        let asked =
            experiment.transports.iter().map(|c| Request::new(experiment, *c, plan.seconds));
        asked
            .into_iter()
            .try_for_each(|r| r.check())
            .map_err(|e| CliError::Usage(e.to_string()))?;
    }
    memory::probe(&own.device, TIMEOUT)?;
    let mut remote = RemoteServer::connect(target, own)?;
    let mut all = Vec::new();
    for experiment in experiments {
        let results = run::run(&mut remote, experiment, plan, progress)?;
        if json {
            progress.suspend(|| report::print_json(&results))?;
        }
        all.push(results);
    }
    progress.finish_and_clear();
    if !json {
        report::print_tables(&all, plan, target.server, [processors(), remote.hello.processors])?;
    }
    Ok(all)
}

impl RemoteServer {
    fn connect(target: &Target<'_>, own: Own) -> Result<RemoteServer, CliError> {
        let failed = |source| CliError::Transfer { peer: target.server.into(), source };
        let stream = dial(target.server)?;
        let mut control = Control::new(stream).map_err(failed)?;
        let hello = match control.receive(NOTICE).map_err(failed)? {
            Some(hello) => Some(hello),
            None => {
                crate::output::note(&format!(
                    "smc: waiting: {} seems to measure with somebody else",
                    target.server
                ));
                control.receive(BUSY).map_err(failed)?
            }
        };
        let Some(ServerMessage::Hello(hello)) = hello else {
            return Err(failed(io::Error::other("is no \"smc perf --serve\"")));
        };
        if hello.version != VERSION {
            let other = format!("speaks version {}, not {VERSION}", hello.version);
            return Err(failed(io::Error::other(other)));
        }
        if target.vsock.is_some() && !hello.vsock {
            return Err(failed(io::Error::other("has no virtio sockets: leave out --vsock")));
        }
        Ok(RemoteServer { control, hello, own, vsock: target.vsock })
    }

    /// The server's next message.
    fn receive(&mut self, timeout: Duration) -> Result<ServerMessage, CliError> {
        match self.control.receive(timeout) {
            Ok(Some(ServerMessage::Error(error))) => Err(self.failed(&printable(&error))),
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(self.failed(&format!("sent nothing for {timeout:?}"))),
            Err(error) => Err(self.failed(&error.to_string())),
        }
    }

    /// The reason for the failure of the server's end, if the server reports one.
    fn failure_report(&mut self) -> Option<CliError> {
        match self.control.receive(FAILURE_REPORT_TIMEOUT) {
            Ok(Some(ServerMessage::Error(error))) => Some(self.failed(&printable(&error))),
            _ => None,
        }
    }

    fn failed(&self, problem: &str) -> CliError {
        let peer = self.control.peer().map_or_else(|_| "?".into(), |peer| peer.to_string());
        CliError::Usage(format!("the server at {peer}: {problem}"))
    }

    /// The address for the client of a run.
    fn address(&self, transport: TransportKind, port: u32) -> Result<String, CliError> {
        if let (TransportKind::Vsock, Some(cid)) = (transport, self.vsock) {
            return Ok(format!("{cid}:{port}"));
        }
        let port = u16::try_from(port).map_err(|_| self.failed("has no such TCP port"))?;
        let mut address = self.control.peer().map_err(CliError::io("control connection"))?;
        address.set_port(port);
        Ok(address.to_string())
    }
}

fn dial(server: &str) -> Result<TcpStream, CliError> {
    let failed = |source| CliError::NoPerfServer { address: server.into(), source };
    let addresses = parse_server(server)?.resolve()?;
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(stream) => return Ok(stream),
            Err(error) => why = error,
        }
    }
    Err(failed(why))
}

impl Runner for RemoteServer {
    fn once(
        &mut self,
        experiment: &Experiment,
        transport: TransportKind,
        plan: &Plan,
    ) -> Result<Ends, CliError> {
        let request = Request::new(experiment, transport, plan.seconds);
        self.control.send(&request).map_err(CliError::io("control connection"))?;
        let ServerMessage::Listening { port } = self.receive(TIMEOUT)? else {
            return Err(self.failed("does not listen"));
        };
        let bind = SocketAddr::from(([0; 4], 0));
        let job = request
            .job(&self.own, bind, self.address(transport, port)?)
            .map_err(|refused| CliError::Usage(refused.to_string()))?;
        let process = Helper::start("client", "__drive", &job)?;
        let client = match process.receive(limit(plan.seconds)) {
            Ok(RunMessage::Done(report)) => report,
            Ok(RunMessage::Listening(_)) => return Err(unexpected_report("client")),
            // The server's error is more specific than the client's "connection reset".
            Err(error) => return Err(self.failure_report().unwrap_or(error)),
        };
        drop(process);
        let ServerMessage::Done(server) = self.receive(limit(plan.seconds))? else {
            return Err(self.failed("did not report what was expected"));
        };
        let ends = Ends { client: *client, server: *server };
        match transport.is_smc() {
            true => same_connection(&ends).map_err(|why| self.failed(why)).map(|()| ends),
            false => Ok(ends),
        }
    }
}

/// Checks that both ends report the same SMC connection: otherwise the run may have measured TCP.
fn same_connection(ends: &Ends) -> Result<(), &'static str> {
    let (Some(client), Some(server)) = (&ends.client.smc, &ends.server.smc) else {
        return Err("one end does not report an SMC connection");
    };
    if !is_printable_id(server) {
        return Err("reports a fabric or GID with illegal characters");
    }
    let same = client.chid == server.chid && client.gid == server.peer && client.peer == server.gid;
    if same { Ok(()) } else { Err("was connected with another peer than this machine") }
}

/// Whether the text is safe for a terminal: letters, digits and dashes.
fn is_printable_id(path: &SmcPath) -> bool {
    [&path.chid, &path.gid, &path.peer].into_iter().all(|text| {
        text.len() <= 64 && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    })
}

/// Text of the server, made safe for a terminal.
fn printable(text: &str) -> String {
    let shown = text.chars().take(ERROR);
    shown.map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::job::EndReport;

    fn ends() -> Ends {
        let end = |gid: &str, peer: &str| EndReport {
            smc: Some(SmcPath {
                window: true,
                chid: "ff00".into(),
                gid: gid.into(),
                peer: peer.into(),
            }),
            ..EndReport::default()
        };
        Ends { client: end("a-1", "b-2"), server: end("b-2", "a-1") }
    }

    #[test]
    fn both_ends_tell_of_the_same_connection_or_the_run_is_void() {
        assert_eq!(same_connection(&ends()), Ok(()));
        let mut tcp = ends();
        tcp.server.smc = None;
        assert!(same_connection(&tcp).is_err());
        let mut others = ends();
        others.server.smc.as_mut().unwrap().peer = "c-3".into();
        assert!(same_connection(&others).is_err());
        let mut hostile = ends();
        hostile.server.smc.as_mut().unwrap().gid = "\x1b[2J".into();
        assert!(same_connection(&hostile).is_err());
    }

    #[test]
    fn what_a_server_says_is_shown_without_control_characters() {
        assert_eq!(printable("a\x1b[2Jb\nc"), "a?[2Jb?c");
        assert_eq!(printable(&"x".repeat(10_000)).len(), ERROR);
    }
}
