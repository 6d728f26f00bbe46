// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Front ends and drivers breaking the rules. Each test ends with a check of two well-behaved devices.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use vhost::vhost_user::{VhostUserFrontend, message::VhostUserHeaderFlag};
use vhost::{VhostBackend, VringConfigData};
use vhost_device_ism::Daemon;
use vhost_device_ism::vhost::{FAULTS, Fault};
use virtio_ism_abi::command::{BACKING_WINDOW, Op};
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Status};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use zerocopy::IntoBytes;

use super::front_end::*;

const DMB: u32 = 64 << 10;

/// A daemon with one socket for an attacker and two for unaffected devices.
pub(crate) struct Stage {
    pub(crate) place: Place,
    daemon: Daemon,
    c: FrontEnd,
    d: FrontEnd,
    token: u64,
}

impl Stage {
    pub(crate) fn new() -> Stage {
        let place = Place::new();
        let daemon = place.daemon_with(&["a", "b", "c", "d"], |config| {
            config.ack_timeout = Duration::from_millis(150);
        });
        let (c, gid_c) = FrontEnd::greet(&place.path("c"));
        let (mut d, _) = FrontEnd::greet(&place.path("d"));
        let token = d.register(gid_c, 1, DMB, BACKING_WINDOW).token.get();
        Stage { place, daemon, c, d, token }
    }

    pub(crate) fn attacker(&self) -> (FrontEnd, Gid) {
        FrontEnd::greet(&self.place.path("a"))
    }

    /// The other devices work as if nothing had happened.
    pub(crate) fn check_others(&mut self) {
        assert_eq!(self.c.transfer(self.token, &[(0, b"fine")], false), Status::Ok);
        assert_eq!(self.c.transfer(self.token, &[], true), Status::Ok);
        assert!(matches!(self.d.event(TIMEOUT), Some(Event::SlabWake(_))));
    }

    /// The attacker's socket serves the next front end.
    pub(crate) fn check_reconnect(&self) {
        let (mut a, _) = self.attacker();
        assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    }

    pub(crate) fn count(&self, name: &str, fault: Fault) -> u64 {
        let ports = self.daemon.list();
        let port = ports.iter().find(|port| port.spec.name == name).unwrap();
        port.faults[FAULTS.iter().position(|f| *f == fault).unwrap()]
    }

    pub(crate) fn wait_for(&self, fault: Fault) {
        eventually(fault.name(), || self.count("a", fault) > 0);
    }

    /// Waits until the daemon has noted so many faults: an answer may come before the note.
    pub(crate) fn await_count(&self, fault: Fault, count: u64) {
        eventually(fault.name(), || self.count("a", fault) == count);
    }
}

/// Breaks a queue in some way and checks whether the other queues still work.
fn a_broken_queue(queue: usize, fault: Fault, attack: impl FnOnce(&mut FrontEnd)) {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    attack(&mut a);
    a.kick(queue);
    stage.wait_for(fault);
    if queue == CONTROL {
        assert_eq!(a.transfer(1, &[], true), Status::Enoent, "the move queue lives");
    } else {
        assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok, "the control queue lives");
    }
    stage.check_others();
    drop(a);
    stage.check_reconnect();
}

#[test]
fn a_descriptor_loop_breaks_its_queue() {
    for queue in [CONTROL, MOVES] {
        a_broken_queue(queue, Fault::BadChain, |a| {
            a.descriptor(queue, 0, 0x20_0000, 8, 1, 1);
            a.descriptor(queue, 1, 0x20_0000, 8, 1, 0);
            a.offer(queue, 0);
        });
    }
}

#[test]
fn a_loop_of_indirect_tables_breaks_its_queue() {
    a_broken_queue(MOVES, Fault::BadChain, |a| {
        // A table with itself as only entry.
        let at = a.buffer(16);
        let entry = [&at.to_le_bytes()[..], &16u32.to_le_bytes(), &[4, 0, 0, 0]].concat();
        vm_memory::Bytes::write_slice(&a.memory, &entry, vm_memory::GuestAddress(at)).unwrap();
        a.descriptor(MOVES, 0, at, 16, 4, 0);
        a.offer(MOVES, 0);
    });
}

#[test]
fn a_head_beyond_the_table_breaks_its_queue() {
    a_broken_queue(CONTROL, Fault::BadChain, |a| a.offer(CONTROL, QUEUE_SIZE));
}

#[test]
fn an_event_queue_with_a_loop_breaks_when_it_is_needed() {
    let mut stage = Stage::new();
    let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
    a.set_memory();
    for queue in 0..QUEUES {
        a.start_queue(queue, 0);
    }
    a.descriptor(EVENTS, 0, 0x20_0000, 64, 3, 0);
    a.offer(EVENTS, 0);
    a.hello();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let token = a.register(gid_b, 1, DMB, BACKING_WINDOW).token.get();
    assert_eq!(b.transfer(token, &[], true), Status::Ok);
    stage.wait_for(Fault::BadChain);
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    stage.check_others();
}

#[test]
fn an_event_buffer_that_is_too_small_breaks_the_queue_and_loses_nothing() {
    let mut stage = Stage::new();
    let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
    a.set_memory();
    for queue in 0..QUEUES {
        a.start_queue(queue, 0);
    }
    let at = a.buffer(64);
    a.add(EVENTS, &[(at, 63, true)]);
    a.hello();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let token = a.register(gid_b, 1, DMB, BACKING_WINDOW).token.get();
    assert_eq!(b.transfer(token, &[], true), Status::Ok);
    stage.wait_for(Fault::NoRoom);
    stage.await_count(Fault::BrokenRing, 1);
    // A driver restarting its queues finds the event.
    let bases = a.pause();
    assert_eq!(bases[EVENTS], 1);
    a.resume(&bases);
    a.feed_events(4);
    assert!(matches!(a.event(TIMEOUT), Some(Event::SlabWake(_))));
    stage.check_others();
}

#[test]
fn zero_lengths_get_an_answer_or_are_counted() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    let at = a.buffer(64);
    // A command of no bytes, with room for the answer.
    a.add(CONTROL, &[(at, 0, false), (at, 64, true)]);
    a.kick(CONTROL);
    assert_eq!(a.used(CONTROL, TIMEOUT).map(|(_, len)| len), Some(8));
    assert_eq!(a.read_buffer(at, 2), Status::Einval.code().to_le_bytes());
    // A command without room.
    let request = a.write_buffer(&[Op::Stats as u8, 0, 0, 0, 1, 0, 0, 0]);
    a.add(CONTROL, &[(request, 8, false), (at, 0, true)]);
    a.kick(CONTROL);
    assert_eq!(a.used(CONTROL, TIMEOUT).map(|(_, len)| len), Some(0));
    // Moves of nothing, with and without room.
    a.add(MOVES, &[(at, 0, false), (at, 4, true)]);
    a.kick(MOVES);
    assert_eq!(a.used(MOVES, TIMEOUT).map(|(_, len)| len), Some(4));
    assert_eq!(a.read_buffer(at, 2), Status::Einval.code().to_le_bytes());
    a.add(MOVES, &[(request, 8, false)]);
    a.kick(MOVES);
    assert_eq!(a.used(MOVES, TIMEOUT).map(|(_, len)| len), Some(0));
    stage.await_count(Fault::NoRoom, 2);
    stage.check_others();
}

#[test]
fn a_payload_outside_of_memory_is_refused_as_a_whole() {
    let mut stage = Stage::new();
    let (mut a, gid_a) = stage.attacker();
    let (mut b, _) = FrontEnd::greet(&stage.place.path("b"));
    let dmb = b.register(gid_a, 1, DMB, BACKING_WINDOW);
    // The header announces 8 + 8 bytes; the second half is outside memory.
    let mut head = Vec::new();
    head.extend_from_slice(&dmb.token.get().to_le_bytes());
    head.extend_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0]);
    for offset in [0u32, 4096] {
        head.extend_from_slice(&offset.to_le_bytes());
        head.extend_from_slice(&8u32.to_le_bytes());
    }
    head.extend_from_slice(&[0xaa; 8]);
    let (at, status) = (a.write_buffer(&head), a.buffer(4));
    for nowhere in [0u64, 0x10_0000 - 4, u64::MAX - 3] {
        let pieces = [(at, head.len() as u32, false), (nowhere, 8, false), (status, 4, true)];
        a.add(MOVES, &pieces);
        a.kick(MOVES);
        assert_eq!(a.used(MOVES, TIMEOUT).map(|(_, len)| len), Some(4));
        assert_eq!(a.read_buffer(status, 2), Status::Eio.code().to_le_bytes());
    }
    assert_eq!(b.read_window(dmb.dmb_off.get(), 8), [0; 8], "all or nothing");
    stage.check_others();
}

#[test]
fn a_request_outside_of_memory_breaks_its_queue() {
    a_broken_queue(CONTROL, Fault::BrokenRing, |a| {
        let reply = a.buffer(64);
        a.add(CONTROL, &[(0x1000, 8, false), (reply, 64, true)]);
    });
}

#[test]
fn a_flood_of_commands_is_limited_and_delays_nobody() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    for _ in 0..40 {
        for _ in 0..30 {
            a.send_command(Op::Stats, &[]);
        }
        for _ in 0..30 {
            a.reply().unwrap();
        }
    }
    stage.check_others();
}

#[test]
fn a_front_end_that_never_acknowledges_is_dropped_alone() {
    let mut stage = Stage::new();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let wish = Wish { maps: Maps::Silent, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
    let gid_a = a.hello();
    // b learns of a's end.
    b.register(gid_a, 1, DMB, BACKING_WINDOW);
    a.send_command(Op::Register, register_request(gid_b, 1, DMB, BACKING_WINDOW).as_bytes());
    a.wait_shm_requests(1);
    stage.check_others();
    assert!(a.config(0, 4).len() == 4, "its own requests are served meanwhile");
    a.wait_cut();
    assert!(stage.count("a", Fault::NoAck) == 1);
    match b.event(TIMEOUT) {
        Some(Event::PeerDown { gid, failed: true }) => assert_eq!(gid, gid_a),
        other => panic!("{other:?}"),
    }
    stage.check_others();
}

#[test]
fn a_front_end_that_is_killed_while_it_is_asked_to_map_is_not_at_fault() {
    let mut stage = Stage::new();
    for _ in 0..5 {
        let wish = Wish { maps: Maps::Silent, ..Wish::default() };
        let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
        let gid = a.hello();
        a.send_command(Op::Register, register_request(gid, 1, DMB, BACKING_WINDOW).as_bytes());
        a.wait_shm_requests(1);
        a.channel.take().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
        a.wait_cut();
    }
    assert_eq!(stage.count("a", Fault::BadMessage), 0);
    stage.check_others();
}

#[test]
fn channels_kept_open_hang_a_bounded_number_of_threads() {
    let mut stage = Stage::new();
    let mut kept = Vec::new();
    let refused = |stage: &Stage| stage.count("a", Fault::RefusedConnection);
    for _ in 0..4 {
        let wish = Wish { maps: Maps::Silent, ..Wish::default() };
        let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
        let gid = a.hello();
        a.send_command(Op::Register, register_request(gid, 1, DMB, BACKING_WINDOW).as_bytes());
        a.wait_shm_requests(1);
        // The main connection is closed, the channel for requests stays.
        kept.push(a.channel.take().unwrap());
        a.socket.shutdown(std::net::Shutdown::Both).unwrap();
    }
    stage.check_others();
    eventually("four hanging threads", || stage.daemon.list().iter().any(|port| port.hanging == 4));
    assert_eq!(refused(&stage), 0);
    let mut fifth = UnixStream::connect(stage.place.path("a")).unwrap();
    assert!(matches!(std::io::Read::read(&mut fifth, &mut [0; 8]), Ok(0) | Err(_)));
    assert_eq!(refused(&stage), 1);
    stage.check_others();
    // Closing the channels ends the threads.
    for channel in kept {
        channel.shutdown(std::net::Shutdown::Both).unwrap();
    }
    eventually("no hanging threads", || stage.daemon.list().iter().all(|port| port.hanging == 0));
    stage.check_reconnect();
}

#[test]
fn a_refused_mapping_fails_the_command_only() {
    let mut stage = Stage::new();
    let (_b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let wish = Wish { maps: Maps::Refuse, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
    a.hello();
    let request = register_request(gid_b, 1, DMB, BACKING_WINDOW);
    assert_eq!(a.command(Op::Register, request.as_bytes()).0, Status::Eio);
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    stage.await_count(Fault::MapRefused, 1);
    stage.check_others();
}

/// SET_VRING_KICK or SET_VRING_CALL with any descriptor.
fn send_vring_fd(socket: &UnixStream, request: u32, queue: u8, fd: &impl AsRawFd) {
    let mut message = Vec::new();
    for word in [request, 1, 8, u32::from(queue), 0] {
        message.extend_from_slice(&word.to_le_bytes());
    }
    socket.send_with_fd(message.as_slice(), fd.as_raw_fd()).unwrap();
}

#[test]
fn a_pipe_in_place_of_an_eventfd_ends_the_connection() {
    const SET_VRING_KICK: u32 = 12;
    const SET_VRING_CALL: u32 = 13;
    let mut stage = Stage::new();
    for (i, request) in [SET_VRING_KICK, SET_VRING_CALL].into_iter().enumerate() {
        let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
        a.set_memory();
        let (reader, writer) = std::io::pipe().unwrap();
        match request {
            SET_VRING_KICK => send_vring_fd(&a.socket, request, 0, &reader),
            _ => send_vring_fd(&a.socket, request, 0, &writer),
        }
        a.wait_cut();
        stage.await_count(Fault::NotEventfd, i as u64 + 1);
        stage.check_others();
    }
    stage.check_reconnect();
}

#[test]
fn an_eventfd_that_stays_readable_is_no_kick() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    let semaphore = vmm_sys_util::eventfd::EventFd::new(libc::EFD_SEMAPHORE).unwrap();
    semaphore.write(u64::MAX - 1).unwrap();
    let _ = a.vhost.set_vring_kick(CONTROL, &semaphore);
    stage.wait_for(Fault::NotEventfd);
    a.wait_cut();
    stage.check_others();
    stage.check_reconnect();
}

/// Brings the call counter of the control queue to its maximum, and sends a command: the worker hangs in its
/// call.
pub(crate) fn fill_call_counter(a: &mut FrontEnd) {
    // A command without an interrupt: with its answer, the call for HELLO is over.
    a.send_command(Op::Stats, &[]);
    eventually("an answer", || a.try_used(CONTROL).is_some());
    a.wait_call(CONTROL, Duration::ZERO);
    a.queues[CONTROL].call.write(u64::MAX - 1).unwrap();
    a.want_call(CONTROL);
    a.send_command(Op::Stats, &[]);
    eventually("an answer", || a.try_used(CONTROL).is_some());
}

#[test]
fn a_device_that_hangs_gives_its_place_back() {
    let place = Place::new();
    let daemon = place.daemon_with(&["a", "b"], |config| {
        config.fabrics[0].caps.devices = Some(2);
    });
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    fill_call_counter(&mut a);
    let call = a.queues[CONTROL].call.try_clone().unwrap();
    drop(a);
    eventually("a hanging thread", || daemon.list().iter().any(|guest| guest.hanging == 1));
    // The hanging device has given its place back: two new devices fit.
    let (mut a, _) = FrontEnd::greet(&place.path("a"));
    let (mut b, _) = FrontEnd::greet(&place.path("b"));
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
    call.read().unwrap();
}

#[test]
fn a_full_call_counter_hangs_its_own_device_only() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    fill_call_counter(&mut a);
    // The hanging worker answers nothing else.
    a.send_command(Op::Stats, &[]);
    std::thread::sleep(QUIET);
    assert_eq!(a.try_used(CONTROL), None);
    stage.check_others();
    assert_eq!(a.config(0, 4).len(), 4);
    assert_eq!(a.transfer(1, &[], true), Status::Enoent, "the other worker goes on");
    assert_eq!(a.pause()[CONTROL], 3, "no lock is held while a call is written");
    drop(a.channel.take());
    let call = a.queues[CONTROL].call.try_clone().unwrap();
    drop(a);
    eventually("a hanging thread", || {
        stage.daemon.list().iter().any(|port| port.spec.name == "a" && port.hanging == 1)
    });
    stage.check_others();
    call.read().unwrap();
    eventually("no hanging thread", || stage.daemon.list().iter().all(|port| port.hanging == 0));
    stage.check_reconnect();
}

#[test]
fn a_full_call_socket_hangs_nobody() {
    const SET_VRING_CALL: u32 = 13;
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let sockets = [CONTROL, EVENTS].map(|queue| {
        let (call, driver) = UnixStream::pair().unwrap();
        send_vring_fd(&a.socket, SET_VRING_CALL, queue as u8, &call);
        driver
    });
    // More than a socket's capacity, without a reader. Each answer needs its worker, and each event the
    // peer's.
    for _ in 0..600 {
        a.want_call(CONTROL);
        a.send_command(Op::Stats, &[]);
        eventually("an answer", || a.try_used(CONTROL).is_some());
    }
    let token = a.register(gid_b, 1, DMB, BACKING_WINDOW).token.get();
    for _ in 0..600 {
        a.want_call(EVENTS);
        assert_eq!(b.transfer(token, &[], true), Status::Ok);
    }
    let mut word = [0; 8];
    (&sockets[CONTROL]).read_exact(&mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 1, "it is signalled");
    stage.check_others();
}

#[test]
fn a_socket_with_a_name_ends_the_connection() {
    const SET_VRING_CALL: u32 = 13;
    let mut stage = Stage::new();
    let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
    a.set_memory();
    let path = stage.place.path("service");
    let service = UnixListener::bind(&path).unwrap();
    let call = UnixStream::connect(&path).unwrap();
    send_vring_fd(&a.socket, SET_VRING_CALL, 0, &call);
    a.wait_cut();
    stage.await_count(Fault::NotEventfd, 1);
    let (mut heard, _) = service.accept().unwrap();
    drop(call);
    assert_eq!(heard.read(&mut [0; 8]).unwrap(), 0, "the service heard nothing");
    stage.check_others();
}

#[test]
fn an_owner_with_a_full_call_counter_does_not_hold_up_its_peer() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let token = a.register(gid_b, 1, DMB, BACKING_WINDOW).token.get();
    a.queues[EVENTS].call.write(u64::MAX - 1).unwrap();
    for _ in 0..50 {
        a.want_call(EVENTS);
        assert_eq!(b.transfer(token, &[], true), Status::Ok);
    }
    stage.check_others();
}

#[test]
fn a_kick_replaced_and_kept_busy_is_not_listened_to() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    let old = a.replace_kick(CONTROL);
    old.write(1).unwrap();
    assert_eq!(a.command(Op::Stats, &[]).0, Status::Ok, "the new kick works");
    // Its count is never taken. (`program` checks for spinning.)
    std::thread::sleep(QUIET);
    assert_eq!(old.read().unwrap(), 1);
    stage.check_others();
}

#[test]
fn illegal_messages_end_the_connection() {
    let mut stage = Stage::new();
    let attacks: [fn(&mut FrontEnd); 5] = [
        |a| drop(std::io::Write::write(&mut &a.socket, &[0xff; 64])),
        |a| drop(a.vhost.set_vring_num(0, 3000)),
        |a| {
            let config = VringConfigData {
                queue_max_size: 64,
                queue_size: 64,
                flags: 0,
                desc_table_addr: 0x1000,
                used_ring_addr: 0x2000,
                avail_ring_addr: 0x3000,
                log_addr: None,
            };
            drop(a.vhost.set_vring_addr(0, &config));
        },
        |a| drop(a.vhost.set_owner()),
        // A socket of the wrong kind as channel for requests.
        |a| {
            let (ours, _theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
            drop(a.vhost.set_backend_request_fd(&ours));
        },
    ];
    for attack in attacks {
        let mut a = FrontEnd::connect(&stage.place.path("a"));
        attack(&mut a);
        a.wait_cut();
        stage.check_others();
    }
    assert!(stage.count("a", Fault::BadMessage) >= 4);
    stage.check_reconnect();
}

#[test]
fn a_front_end_may_vanish_after_any_message() {
    let mut stage = Stage::new();
    let path = stage.place.path("a");
    for step in 0.. {
        let socket = UnixStream::connect(&path).unwrap();
        let mut vhost =
            vhost::vhost_user::Frontend::from_stream(socket.try_clone().unwrap(), QUEUES as u64);
        vhost.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        if vanish_after(step, &mut vhost) {
            break;
        }
        drop(vhost);
        assert!(step < 100);
    }
    // In the middle of a message, and with outstanding commands.
    let socket = UnixStream::connect(&path).unwrap();
    std::io::Write::write_all(&mut &socket, &[1, 0, 0, 0, 1]).unwrap();
    drop(socket);
    for _ in 0..10 {
        let (mut a, gid) = stage.attacker();
        let request = register_request(gid, 1, DMB, BACKING_WINDOW);
        a.send_command(Op::Register, request.as_bytes());
        a.send_move(MOVES, 77, &[(0, &[1; 5000])], true);
    }
    stage.check_others();
    stage.check_reconnect();
}

/// Sends `step` messages of a start; `true`: there are no more.
fn vanish_after(step: usize, vhost: &mut vhost::vhost_user::Frontend) -> bool {
    use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
    let memory = memfd(1 << 20, true);
    let region = vhost::VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 1 << 20,
        userspace_addr: 0x1000_0000,
        mmap_offset: 0,
        mmap_handle: memory.as_raw_fd(),
    };
    let rings = VringConfigData {
        queue_max_size: 64,
        queue_size: 64,
        flags: 0,
        desc_table_addr: 0x1000_0000,
        used_ring_addr: 0x1000_2000,
        avail_ring_addr: 0x1000_1000,
        log_addr: None,
    };
    let event = vmm_sys_util::eventfd::EventFd::new(0).unwrap();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    type Message<'a> = Box<dyn FnOnce(&mut vhost::vhost_user::Frontend) + 'a>;
    let messages: Vec<Message<'_>> = vec![
        Box::new(|v| v.set_owner().unwrap()),
        Box::new(|v| assert!(v.get_features().is_ok())),
        Box::new(|v| assert!(v.get_protocol_features().is_ok())),
        Box::new(|v| {
            let all = Protocol::CONFIG | Protocol::MQ | Protocol::REPLY_ACK;
            v.set_protocol_features(all | Protocol::BACKEND_REQ | Protocol::SHMEM).unwrap();
        }),
        Box::new(|v| v.set_features(VERSION_1 | PROTOCOL_FEATURES | 0xf).unwrap()),
        Box::new(|v| assert!(v.get_shmem_config().is_ok())),
        Box::new(|v| v.set_backend_request_fd(&theirs).unwrap()),
        Box::new(|v| assert!(v.set_mem_table(&[region]).is_ok())),
        Box::new(|v| v.set_vring_num(0, 64).unwrap()),
        Box::new(|v| v.set_vring_base(0, 0).unwrap()),
        Box::new(|v| v.set_vring_addr(0, &rings).unwrap()),
        Box::new(|v| v.set_vring_call(0, &event).unwrap()),
        Box::new(|v| v.set_vring_kick(0, &event).unwrap()),
        Box::new(|v| v.set_vring_enable(0, true).unwrap()),
        Box::new(|_| event.write(1).unwrap()),
        Box::new(|v| assert!(v.get_vring_base(0).is_ok())),
    ];
    let all = step >= messages.len();
    for message in messages.into_iter().take(step) {
        message(vhost);
    }
    all
}
