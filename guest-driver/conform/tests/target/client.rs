// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The target as a client, connecting again and again.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use smc_core::handshake::{
    Accepted, ClientStep, Config, DeclineReason, KnownLink, SendDecline, start_on,
};
use smc_core::time::Tick;
use smc_core::wire::ids::{Chid, Gid};

use super::links::TargetEnds;
use super::{Fault, Host, Known, LINK, Network, WAIT, abort, dmbe, echo, links, read, write};

/// Clients of one server until they are dropped.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Clients {
    pub(crate) fn start(server: SocketAddr, host: Host, network: Network, fault: Fault) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, config) = (stop.clone(), Arc::new(host.config.clone()));
        let client = Client { config, host, network, known: Known::default(), fault };
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok(tcp) = TcpStream::connect(server) else { return };
                client.connect(&tcp);
            }
        });
        Clients { stop, thread: Some(thread) }
    }

    /// Ends once the server has gone.
    pub(crate) fn join(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

struct Client {
    config: Arc<Config>,
    host: Host,
    network: Network,
    known: Known,
    fault: Fault,
}

impl Client {
    fn connect(&self, tcp: &TcpStream) {
        let fault = &self.fault;
        let _ = tcp.set_nodelay(true);
        let started = start_on(self.config.clone(), self.host.route.clone(), Tick(0));
        let Ok((awaiting, proposal)) = started else { return };
        write(tcp, proposal, fault);
        let _ = tcp.set_read_timeout(Some(WAIT));
        let message = match read(tcp, awaiting.reader(), fault) {
            Ok(message) => message,
            Err(_) if fault.falls_back => return echo(tcp, fault),
            Err(_) => return abort(tcp),
        };
        let known =
            |chid: Chid, gid: Gid| self.known.lock().unwrap().get(&(chid.0, gid.0)).copied();
        match awaiting.handle_with(&message, known, |_| KnownLink::NoGroup) {
            ClientStep::Offered(accepted) => self.confirm(tcp, accepted),
            ClientStep::OfferedR(accepted) => {
                let (ends, own) = TargetEnds::new(&self.network);
                let (established, confirm) = accepted.confirm(own, &self.host.alternates);
                write(tcp, confirm, fault);
                links::carry(tcp, ends, &established, &self.config, fault);
            }
            ClientStep::Decline(decline) => self.decline(tcp, decline),
            ClientStep::PeerDeclined(_) if fault.ends_after_decline => abort(tcp),
            ClientStep::PeerDeclined(_) => echo(tcp, fault),
            ClientStep::Fail(_) if fault.falls_back => echo(tcp, fault),
            ClientStep::Fail(_) => abort(tcp),
        }
    }

    fn confirm(&self, tcp: &TcpStream, accepted: Accepted) {
        if let Some(fabric) = &self.host.fabric
            && !(fabric.reaches(&accepted.devices()) && fabric.has(&accepted.peer()))
        {
            return self.decline(tcp, accepted.decline(DeclineReason::Unreachable));
        }
        let (established, confirm) = accepted.confirm(dmbe(), LINK);
        let pair = established.devices;
        self.known.lock().unwrap().insert((pair.chid.0, pair.peer.0), established.terms);
        write(tcp, confirm, &self.fault);
        after_confirm(tcp);
    }

    fn decline(&self, tcp: &TcpStream, decline: SendDecline) {
        write(tcp, decline.message, &self.fault);
        echo(tcp, &self.fault);
    }
}

/// Whatever comes behind the Confirm breaks the connection.
fn after_confirm(mut tcp: &TcpStream) {
    let mut byte = [0];
    let _ = tcp.set_read_timeout(Some(std::time::Duration::from_secs(20)));
    if matches!(std::io::Read::read(&mut tcp, &mut byte), Ok(1)) {
        abort(tcp);
    }
}
