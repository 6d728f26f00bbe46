// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An RNIC of this machine for the suite's links of SMC-R.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smc_conform::{LinkEnd, QueuePair, RdmaDevice};
use smc_core::wire::ids::{Gid, Mtu, Psn, Qpn, Rkey};
use smc_verbs::{
    Access, Completed, Completion, Context, Cq, GidEntry, GidKind, Hops, Init, Memory, Mr, Payload,
    Pd, Qp, QpCaps, ReadyToSend, Recv, RemoteEnd, VerbsError, Work, devices,
};

/// Port used by the suite.
const PORT: u8 = 1;
/// Receive buffers, and bytes of each: as many as a message of version 2 may have (LLCV2-4).
const RECEIVES: usize = 32;
const MESSAGE: usize = 8192;
/// Send buffers, used in turn.
const SENDS: usize = 32;
/// Bytes writable for the target.
const ELEMENT: usize = 64 << 10;
/// How long a request may wait for a buffer.
const BUFFER: Duration = Duration::from_secs(10);
/// How often completions are looked at.
const LOOK: Duration = Duration::from_micros(500);
/// How a GID of an IPv4 address begins.
const IPV4: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
/// The MTU of the suite's Accept and Confirm.
const MTU: Mtu = Mtu::B1024;

/// An RNIC with its address for the suite.
pub(super) struct Rnic {
    context: Arc<Context>,
    source: GidEntry,
}

impl Rnic {
    /// Opens the device `name`, or the first one, for connections of the address `local`. If
    /// `local` is unspecified, an IPv4 address is preferred.
    ///
    /// # Errors
    /// There is no device, or the device has no fitting address.
    pub(super) fn open(name: &str, local: IpAddr) -> Result<Rnic, String> {
        let list = devices().map_err(|why| why.to_string())?;
        let is_named = |found: &&smc_verbs::DeviceInfo| name == "any" || found.name() == name;
        let info = list.iter().find(is_named).ok_or(format!("there is no RDMA device {name}"))?;
        let context = Context::open(info).map_err(|error| error.to_string())?;
        let gids = context.gids(PORT).map_err(|error| error.to_string())?;
        let wanted = match local {
            IpAddr::V4(v4) => Gid::from_ipv4(v4.octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        };
        let fits = |entry: &GidEntry| {
            entry.kind == GidKind::RoceV2 && (local.is_unspecified() || entry.gid == wanted)
        };
        let fitting = gids.into_iter().filter(fits);
        let source =
            fitting.min_by_key(|entry| IPV4.iter().ne(entry.gid.0.iter().take(IPV4.len())));
        let source = source.ok_or(format!("{} has no address {local}", info.name()))?;
        Ok(Rnic { context, source })
    }

    fn make(&self) -> Result<Link, VerbsError> {
        let pd = Pd::new(&self.context)?;
        let cq = Cq::new(&self.context, 256, None)?;
        let counts = u32::try_from(SENDS).unwrap_or(u32::MAX);
        let receive_requests = u32::try_from(RECEIVES).unwrap_or(u32::MAX);
        let caps = QpCaps { send_requests: counts, receive_requests, inline: 0 };
        let qp = Qp::new(&pd, &cq, &cq, caps)?.init(PORT)?;
        let element = Mr::register(&pd, &Memory::new(ELEMENT)?, Access::RemoteWrite)?;
        let len = (RECEIVES + SENDS) * MESSAGE;
        let buffers = Mr::register(&pd, &Memory::new(len)?, Access::Local)?;
        let [a, b, c, ..] = *uuid::Uuid::new_v4().as_bytes();
        let psn = Psn::new(u32::from_be_bytes([0, a, b, c]));
        let link = Link {
            number: qp.qp_num(),
            sgid_index: self.source.index,
            state: State::Made(qp),
            psn,
            cq,
            element,
            buffers,
            posted: 0,
            completed: 0,
            received: VecDeque::new(),
        };
        Ok(link)
    }
}

impl RdmaDevice for Rnic {
    fn gid(&self) -> [u8; 16] {
        self.source.gid.0
    }

    fn mac(&self) -> [u8; 6] {
        let device = self.source.net_device.as_ref();
        device.and_then(|device| device.mac()).map_or([0; 6], |mac| mac.0)
    }

    fn queue_pair(&self) -> Result<Box<dyn QueuePair>, String> {
        Ok(Box::new(self.make().map_err(|error| error.to_string())?))
    }
}

enum State {
    Made(Qp<Init>),
    Connected(Qp<ReadyToSend>),
    Failed,
}

struct Link {
    number: Qpn,
    sgid_index: u8,
    state: State,
    psn: Psn,
    cq: Arc<Cq>,
    element: Mr,
    /// Buffers of receives first, then of sends.
    buffers: Mr,
    /// Send requests, and their completions.
    posted: usize,
    completed: usize,
    /// Messages that came before the suite asked for them.
    received: VecDeque<Vec<u8>>,
}

/// Numbers of send requests begin here.
const SEND_IDS: u64 = 1 << 32;

impl Link {
    fn buffer(&self, index: usize) -> usize {
        index * MESSAGE
    }

    fn receive_request(&self, id: u64) -> Result<Recv, String> {
        let at = self.buffer(usize::try_from(id).unwrap_or(usize::MAX) % RECEIVES);
        let buffer = self.buffers.sge(at, MESSAGE).map_err(|error| error.to_string())?;
        Ok(Recv { id, buffer })
    }

    fn connected(&self) -> Result<&Qp<ReadyToSend>, String> {
        match &self.state {
            State::Connected(qp) => Ok(qp),
            _ => Err("the queue pair is not connected".into()),
        }
    }

    fn bring_up(&self, qp: Qp<Init>, peer: &LinkEnd) -> Result<Qp<ReadyToSend>, String> {
        let requests = (0..RECEIVES as u64).map(|id| self.receive_request(id));
        let requests = requests.collect::<Result<Vec<_>, _>>()?;
        qp.post_recv(&requests).map_err(|error| error.to_string())?;
        let mtu = Mtu::from_code(peer.mtu.min(MTU.code()));
        let remote = RemoteEnd {
            gid: Gid(peer.gid),
            qp_num: Qpn::new(peer.qpn),
            psn: Psn::new(peer.psn),
            mtu,
            sgid_index: self.sgid_index,
            hops: Hops::Direct,
        };
        let qp = qp.ready_to_receive(&remote).map_err(|error| error.to_string())?;
        qp.ready_to_send(self.psn).map_err(|error| error.to_string())
    }
}

impl Link {
    /// Posts a send request: a message, or bytes for the target's memory.
    fn post(&mut self, bytes: &[u8], to: Option<(u64, Rkey)>) -> Result<(), String> {
        let end = Instant::now() + BUFFER;
        while self.posted - self.completed >= SENDS {
            if !self.complete()? {
                if Instant::now() > end {
                    return Err(format!("no request was completed within {} s", BUFFER.as_secs()));
                }
                std::thread::sleep(LOOK);
            }
        }
        let at = self.buffer(RECEIVES + self.posted % SENDS);
        self.buffers.memory().copy_in(at, bytes).map_err(|error| error.to_string())?;
        let sge = self.buffers.sge(at, bytes.len()).map_err(|error| error.to_string())?;
        let (id, payload) = (SEND_IDS + self.posted as u64, Payload::Registered(sge));
        let work = match to {
            Some((address, rkey)) => Work::write(id, payload, address, rkey),
            None => Work::send(id, payload),
        };
        self.connected()?.post_send(&[work.signaled()]).map_err(|error| error.to_string())?;
        self.posted += 1;
        Ok(())
    }

    /// Takes a completion, if there is one, and keeps a received message.
    fn complete(&mut self) -> Result<bool, String> {
        let mut one = [Completion::default()];
        if self.cq.poll(&mut one).map_err(|error| error.to_string())? == 0 {
            return Ok(false);
        }
        let [completion] = one;
        let Completed::Receive { len } =
            completion.result().map_err(|status| status.to_string())?
        else {
            self.completed += 1;
            return Ok(true);
        };
        let request = self.receive_request(completion.id())?;
        let at = self.buffer(usize::try_from(completion.id()).unwrap_or(0) % RECEIVES);
        let mut message = vec![0; len.min(MESSAGE)];
        self.buffers.memory().copy_out(at, &mut message).map_err(|error| error.to_string())?;
        // A queue pair refusing the request fails; the next completion shows the failure.
        let _ = self.connected()?.post_recv(&[request]);
        self.received.push_back(message);
        Ok(true)
    }
}

impl QueuePair for Link {
    fn qpn(&self) -> u32 {
        self.number.get()
    }

    fn psn(&self) -> u32 {
        self.psn.get()
    }

    fn rkey(&self) -> u32 {
        self.element.rkey().0
    }

    fn address(&self) -> u64 {
        self.element.address()
    }

    fn connect(&mut self, peer: &LinkEnd) -> Result<(), String> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Made(qp) => {
                self.state = State::Connected(self.bring_up(qp, peer)?);
                Ok(())
            }
            other => {
                self.state = other;
                Err("the queue pair is connected, or has failed".into())
            }
        }
    }

    fn send(&mut self, message: &[u8]) -> Result<(), String> {
        self.post(message, None)
    }

    fn write(&mut self, (rkey, address): (u32, u64), bytes: &[u8]) -> Result<(), String> {
        let places = (address..).step_by(MESSAGE);
        let mut pieces = places.zip(bytes.chunks(MESSAGE));
        pieces.try_for_each(|(address, piece)| self.post(piece, Some((address, Rkey(rkey)))))
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // A ring of another size ends before.
        let _ = self.element.memory().copy_out(at, &mut bytes);
        bytes
    }

    fn receive(&mut self, limit: Duration) -> Result<Option<Vec<u8>>, String> {
        let until = Instant::now() + limit;
        loop {
            if let Some(message) = self.received.pop_front() {
                return Ok(Some(message));
            }
            if !self.complete()? {
                if Instant::now() >= until {
                    return Ok(None);
                }
                std::thread::sleep(LOOK);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, TcpListener};

    use guest_driver::socket::{DEFAULT_EID, Rnics};
    use guest_driver::{Config, SmcListener, SmcStream, Stack};
    use smc_conform::{Cases, Names, Options, Target, Verdict};
    use smc_test_support::TIMEOUT;

    use super::*;

    const SUITE: [u8; 4] = [127, 0, 0, 1];
    const TARGET: [u8; 4] = [127, 0, 0, 2];

    /// A stack of the project with an RNIC of the double, and no other device.
    fn stack(rnic: &str) -> Arc<Stack> {
        let mut config = Config::new("/nowhere");
        config.devices.clear();
        config.rnics = Rnics::Names(vec![rnic.into()]);
        config.smcr.max_links = 1;
        config.clc_timeout = TIMEOUT;
        Stack::open(config).unwrap()
    }

    /// Sends back what comes, until the peer's end.
    fn echo(mut stream: SmcStream) {
        let mut buffer = vec![0; 16 << 10];
        while let Ok(n @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..n]).is_err() {
                return;
            }
        }
    }

    /// Plays the cases of data; all of them pass.
    fn plays(target: Target, rnic: &Rnic) {
        let names = Names {
            eid: DEFAULT_EID.into(),
            seid: None,
            chid: 0xff42,
            gid: [0x43; 16],
            mac: rnic.mac(),
            roce_gid: rnic.gid(),
            subnet: ([127, 0, 0, 0], 8),
            prefix: None,
        };
        let options = Options {
            target,
            echo: true,
            aggressive: true,
            connections: 4,
            wait: TIMEOUT,
            time_factor: 4,
            only: vec!["cdc-link".into()],
            layers: vec!["cdc".into()],
            fabric: None,
            rdma: Some(rnic),
            announce: None,
            names,
        };
        let results = smc_conform::run(&Cases::load(None).unwrap(), &options, &|_| {}).unwrap();
        let bad = results.results.iter().filter(|one| one.verdict != Verdict::Pass);
        let bad: Vec<_> = bad.map(|one| format!("{}: {}", one.case.id, one.says)).collect();
        assert!(bad.is_empty(), "{}", bad.join("\n"));
        assert!(results.results.len() >= 20);
    }

    /// An RNIC at each end, with these names.
    fn add(rnics: [(&str, [u8; 4]); 2]) {
        for (name, address) in rnics {
            smc_verbs::double::Rnic::add(name, address);
        }
    }

    #[test]
    fn a_server_keeps_the_rules_of_data_over_rdma() {
        add([("conform0", SUITE), ("conform1", TARGET)]);
        let listener = SmcListener::bind(&stack("conform1"), (Ipv4Addr::from(TARGET), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                std::thread::spawn(|| echo(stream));
            }
        });
        let rnic = Rnic::open("conform0", Ipv4Addr::from(SUITE).into()).unwrap();
        plays(Target::Server(address), &rnic);
    }

    #[test]
    fn a_client_keeps_the_rules_of_data_over_rdma() {
        add([("conform2", SUITE), ("conform3", TARGET)]);
        let listener = TcpListener::bind((Ipv4Addr::from(TARGET), 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stack = stack("conform2");
        std::thread::spawn(move || {
            loop {
                match SmcStream::connect(&stack, address) {
                    Ok(stream) => echo(stream),
                    // The suite is over.
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => return,
                    // An end of the suite's within a handshake.
                    Err(_) => {}
                }
            }
        });
        let rnic = Rnic::open("conform3", Ipv4Addr::from(TARGET).into()).unwrap();
        plays(Target::Client { listener, program: None }, &rnic);
    }
}
