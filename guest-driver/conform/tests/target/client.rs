// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The target as a client, which connects again and again.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use smc_core::handshake::{ClientStep, Config, Kinds, KnownLink, SendDecline, start_on};
use smc_core::time::Tick;

use super::links::TargetEnds;
use super::{Fault, LINK, Network, WAIT, abort, config, dmbe, echo, links, read, route, write};

/// Clients of one server until they are dropped.
pub(crate) struct Clients {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Clients {
    pub(crate) fn start(
        server: SocketAddr,
        kinds: Kinds,
        network: Network,
        fault: Fault,
    ) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, config) = (stop.clone(), Arc::new(config(kinds)));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let Ok(tcp) = TcpStream::connect(server) else { return };
                connect(&tcp, &config, &network, &fault);
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

fn connect(tcp: &TcpStream, config: &Arc<Config>, network: &Network, fault: &Fault) {
    let _ = tcp.set_nodelay(true);
    let Ok((awaiting, proposal)) = start_on(config.clone(), route(), Tick(0)) else { return };
    write(tcp, proposal, fault);
    let _ = tcp.set_read_timeout(Some(WAIT));
    let message = match read(tcp, awaiting.reader(), fault) {
        Ok(message) => message,
        Err(_) if fault.falls_back => return echo(tcp, fault),
        Err(_) => return abort(tcp),
    };
    match awaiting.handle_with(&message, |_, _| None, |_| KnownLink::NoGroup) {
        ClientStep::Offered(accepted) => {
            let (_, confirm) = accepted.confirm(dmbe(), LINK);
            write(tcp, confirm, fault);
            after_confirm(tcp);
        }
        ClientStep::OfferedR(accepted) => {
            let (ends, own) = TargetEnds::new(network);
            let (established, confirm) = accepted.confirm(own, &[]);
            write(tcp, confirm, fault);
            links::carry(tcp, ends, &established, config, fault);
        }
        ClientStep::Decline(decline) => decline_with(tcp, decline, fault),
        ClientStep::PeerDeclined(_) if fault.ends_after_decline => abort(tcp),
        ClientStep::PeerDeclined(_) => echo(tcp, fault),
        ClientStep::Fail(_) if fault.falls_back => echo(tcp, fault),
        ClientStep::Fail(_) => abort(tcp),
    }
}

fn decline_with(tcp: &TcpStream, decline: SendDecline, fault: &Fault) {
    write(tcp, decline.message, fault);
    echo(tcp, fault);
}

/// Whatever comes behind the Confirm breaks the connection.
fn after_confirm(mut tcp: &TcpStream) {
    let mut byte = [0];
    let _ = tcp.set_read_timeout(Some(std::time::Duration::from_secs(20)));
    if matches!(std::io::Read::read(&mut tcp, &mut byte), Ok(1)) {
        abort(tcp);
    }
}
