// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The target as a server.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use smc_core::handshake::{
    AfterDecline, AwaitProposal, Choice, Config, ConfirmStep, ConfirmStepR, DeclineReason,
    Selection, SendDecline, ServerStep,
};
use smc_core::time::Tick;
use smc_core::wire::clc::{Guess, looks_like_clc};

use super::links::TargetEnds;
use super::{
    Fault, Host, Known, LINK, Network, WAIT, Wrong, abort, dmbe, echo, hold, links, read, write,
};

/// A server listening until dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) host: Host,
    /// Where the suite makes its queue pairs.
    pub(crate) network: Network,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    config: Arc<Config>,
    host: Host,
    known: Known,
    fault: Fault,
    network: Network,
}

impl Server {
    pub(crate) fn start(host: Host, fault: Fault) -> Server {
        let listener = TcpListener::bind((host.address, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (config, known, network) =
            (Arc::new(host.config.clone()), Known::default(), Network::default());
        let shown = host.clone();
        let shared = Arc::new(Shared { config, host, known, fault, network: network.clone() });
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            for tcp in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let shared = shared.clone();
                std::thread::spawn(move || shared.serve(&tcp));
            }
        });
        Server { address, host: shown, network, stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
        let _ = self.thread.take().unwrap().join();
    }
}

impl Shared {
    fn serve(&self, tcp: &TcpStream) {
        let _ = tcp.set_nodelay(true);
        let _ = tcp.set_read_timeout(Some(if self.fault.waits {
            Duration::from_secs(60)
        } else {
            WAIT
        }));
        match looks_like_clc(&peek(tcp)) {
            Guess::Yes => {}
            _ => return echo(tcp, &self.fault),
        }
        let awaiting = AwaitProposal::new(self.config.clone(), Tick(0));
        let message = match read(tcp, awaiting.reader(), &self.fault) {
            Ok(message) => message,
            Err(wrong) => return self.broken(tcp, &wrong),
        };
        if (self.fault.refuses)(&message) {
            return abort(tcp);
        }
        match awaiting.handle_on(&message, || self.host.route.clone()) {
            ServerStep::Eligible(selection) => self.accept(tcp, selection),
            ServerStep::Decline(decline) => self.decline(tcp, decline),
            ServerStep::PeerDeclined(_) => {
                if self.fault.answers_declines {
                    write(tcp, message, &self.fault);
                }
                echo(tcp, &self.fault);
            }
            ServerStep::Fail(_) => self.broken(tcp, &Wrong::Io(std::io::ErrorKind::Other.into())),
        }
    }

    /// A protocol error, or silence: the end, unless the fault says otherwise.
    fn broken(&self, tcp: &TcpStream, wrong: &Wrong) {
        let _ = wrong.is_timeout();
        match self.fault.falls_back {
            true => echo(tcp, &self.fault),
            false => abort(tcp),
        }
    }

    fn decline(&self, tcp: &TcpStream, decline: SendDecline) {
        write(tcp, decline.message, &self.fault);
        match decline.then {
            AfterDecline::FallBack if self.fault.ends_after_decline => abort(tcp),
            AfterDecline::FallBack => echo(tcp, &self.fault),
            AfterDecline::Break => {}
        }
    }

    fn accept(&self, tcp: &TcpStream, selection: Selection) {
        let reached = |choice: &Choice| match (choice, &self.host.fabric) {
            (Choice::D(_, pair), Some(fabric)) => fabric.reaches(pair),
            _ => true,
        };
        let choice = match self.fault.takes_last {
            true => selection.choices().filter(reached).last(),
            false => selection.choices().find(reached),
        };
        let Some(choice) = choice else {
            return self.decline(tcp, selection.decline(DeclineReason::Unreachable));
        };
        match choice {
            Choice::D(_, candidate) => {
                let key = (candidate.chid.0, candidate.peer.0);
                let known = self.known.lock().unwrap().get(&key).copied();
                let known = if self.fault.forgets { None } else { known };
                let (awaiting, accept) = selection.accept(candidate, known, dmbe(), LINK, Tick(0));
                write(tcp, accept, &self.fault);
                let message = match read(tcp, awaiting.reader(), &self.fault) {
                    Ok(message) => message,
                    Err(wrong) => return self.broken(tcp, &wrong),
                };
                match awaiting.handle(&message) {
                    ConfirmStep::Established(established) => {
                        if self.host.fabric.as_ref().is_some_and(|on| !on.has(&established.peer)) {
                            return abort(tcp);
                        }
                        self.known.lock().unwrap().insert(key, established.terms);
                        hold(tcp);
                    }
                    ConfirmStep::Decline(decline) => self.decline(tcp, decline),
                    ConfirmStep::PeerDeclined(declined) => {
                        if declined.out_of_sync && !self.fault.keeps_groups {
                            self.known.lock().unwrap().remove(&key);
                        }
                        echo(tcp, &self.fault);
                    }
                    ConfirmStep::Fail(_) if self.fault.takes_any_confirm => hold(tcp),
                    ConfirmStep::Fail(_) => {
                        self.broken(tcp, &Wrong::Io(std::io::ErrorKind::Other.into()))
                    }
                }
            }
            Choice::R(peer) => {
                let (ends, own) = TargetEnds::new(&self.network);
                let accepted = selection.accept_r(peer.version(), None, own, Tick(0));
                let Some((awaiting, accept)) = accepted else { return abort(tcp) };
                write(tcp, accept, &self.fault);
                let message = match read(tcp, awaiting.reader(), &self.fault) {
                    Ok(message) => message,
                    Err(wrong) => return self.broken(tcp, &wrong),
                };
                match awaiting.handle(&message, |_| true) {
                    ConfirmStepR::Established(established) => {
                        links::carry(tcp, ends, &established, &self.config, &self.fault);
                    }
                    ConfirmStepR::Decline(decline) => self.decline(tcp, decline),
                    ConfirmStepR::PeerDeclined(_) => echo(tcp, &self.fault),
                    ConfirmStepR::Fail(_) => abort(tcp),
                }
            }
        }
    }
}

/// The first bytes, as many as decide; the bytes stay in the stream.
fn peek(tcp: &TcpStream) -> Vec<u8> {
    let mut bytes = [0; 8];
    loop {
        let Ok(n) = tcp.peek(&mut bytes) else { return Vec::new() };
        if n == 0 || looks_like_clc(&bytes[..n]) != Guess::NeedMore {
            return bytes[..n].to_vec();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
