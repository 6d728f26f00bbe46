// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A wire for observing and changing packets: a TUN device returning its packets with exchanged addresses,
//! like a second host with the same sockets.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::bed::ip;

/// Addresses of listening servers.
pub(crate) const HERE: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Addresses of the servers for clients.
pub(crate) const THERE: [&str; 2] = ["10.77.0.2", "fd77::2"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Pass,
    Lose,
}

/// The wire, ended on drop.
pub(crate) struct Wire {
    seen: Arc<Mutex<Vec<Segment>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A SYN or a SYN-ACK in its form on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) synack: bool,
    pub(crate) options: Vec<u8>,
}

impl Wire {
    /// A wire without changes to packets.
    pub(crate) fn honest() -> Wire {
        Wire::new(|_| Fate::Pass)
    }

    /// A wire with a middlebox.
    pub(crate) fn new(mut middle: impl FnMut(&mut Packet) -> Fate + Send + 'static) -> Wire {
        let mut tun = open().expect("a TUN device");
        ip("addr add 10.77.0.1/24 dev wire");
        ip("addr add fd77::1/64 dev wire nodad");
        ip("link set wire up");
        ip("link set lo up");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let (record, end) = (seen.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut buffer = vec![0u8; 65536];
            while !end.load(Ordering::Relaxed) {
                let mut fds = [rustix::event::PollFd::new(&tun, rustix::event::PollFlags::IN)];
                let pause = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                if !matches!(rustix::event::poll(&mut fds, Some(&pause)), Ok(1)) {
                    continue;
                }
                let Ok(n) = tun.read(&mut buffer) else { continue };
                let Some(mut packet) = Packet::new(buffer[..n].to_vec()) else { continue };
                if packet.is_syn() {
                    let options = packet.options().to_vec();
                    record.lock().unwrap().push(Segment { synack: packet.is_ack(), options });
                }
                if middle(&mut packet) == Fate::Pass {
                    packet.turn_round();
                    let _ = tun.write(&packet.bytes);
                }
            }
        });
        Wire { seen, stop, thread: Some(thread) }
    }

    /// The new SYNs and SYN-ACKs; each is returned once.
    pub(crate) fn seen(&self) -> Vec<Segment> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The address of a server from the view of its clients.
pub(crate) fn there(server: SocketAddr) -> SocketAddr {
    let address = THERE[usize::from(server.is_ipv6())];
    SocketAddr::new(address.parse::<IpAddr>().unwrap(), server.port())
}

fn open() -> io::Result<File> {
    const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = [0u8; 40];
    request[..4].copy_from_slice(b"wire");
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as u16;
    request[16..18].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: the request is as long as a `struct ifreq` and lives.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, request.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(tun) }
}

/// A TCP segment in its IP packet.
pub(crate) struct Packet {
    bytes: Vec<u8>,
    /// Offset of the TCP header.
    tcp: usize,
}

impl Packet {
    fn new(bytes: Vec<u8>) -> Option<Packet> {
        let (protocol, tcp) = match bytes.first()? >> 4 {
            4 => (*bytes.get(9)?, usize::from(bytes[0] & 15) * 4),
            _ => (*bytes.get(6)?, 40),
        };
        (protocol == 6 && bytes.len() >= tcp + 20).then_some(Packet { bytes, tcp })
    }

    pub(crate) fn is_syn(&self) -> bool {
        self.bytes[self.tcp + 13] & 2 != 0
    }

    pub(crate) fn is_ack(&self) -> bool {
        self.bytes[self.tcp + 13] & 16 != 0
    }

    fn end_of_options(&self) -> usize {
        self.tcp + usize::from(self.bytes[self.tcp + 12] >> 4) * 4
    }

    pub(crate) fn options(&self) -> &[u8] {
        &self.bytes[self.tcp + 20..self.end_of_options()]
    }

    /// Puts eight other bytes into the place of option 254 and of the NOPs behind it.
    pub(crate) fn replace_option(&mut self, with: [u8; 8]) {
        let end = self.end_of_options();
        let options = &mut self.bytes[self.tcp + 20..end];
        if let Some(at) = options.windows(2).position(|two| two == [254, 6]) {
            options[at..at + 8].copy_from_slice(&with);
            self.fill_in_checksum();
        }
    }

    /// Exchanges the addresses, without an effect on checksums.
    fn turn_round(&mut self) {
        let (from, length) = if self.bytes[0] >> 4 == 4 { (12, 4) } else { (8, 16) };
        let (left, right) = self.bytes[from..from + 2 * length].split_at_mut(length);
        left.swap_with_slice(right);
    }

    fn fill_in_checksum(&mut self) {
        let (from, length) = if self.bytes[0] >> 4 == 4 { (12, 8) } else { (8, 32) };
        self.bytes[self.tcp + 16..self.tcp + 18].fill(0);
        let tcp_length = (self.bytes.len() - self.tcp) as u32;
        let halves = |bytes: &[u8]| -> u32 {
            let pairs = bytes.chunks(2);
            pairs.map(|two| u32::from(two[0]) << 8 | u32::from(*two.get(1).unwrap_or(&0))).sum()
        };
        let mut sum = halves(&self.bytes[from..from + length])
            + 6
            + tcp_length
            + halves(&self.bytes[self.tcp..]);
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let sum = !(sum as u16);
        self.bytes[self.tcp + 16..self.tcp + 18].copy_from_slice(&sum.to_be_bytes());
    }
}
