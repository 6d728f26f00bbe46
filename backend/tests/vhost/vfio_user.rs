// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests of vfio-user monitors: the driver's rings behind the registers of a PCI function.

use std::fs::File;
use std::io::ErrorKind;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{SealFlags, fcntl_add_seals};
use rustix::io::Errno;
use vhost::vhost_user::Frontend;
use vhost_device_ism::Daemon;
use vhost_device_ism::vhost::{FAULTS, Fault};
use virtio_ism_abi::command::{BACKING_WINDOW, Op, attach_flags};
use virtio_ism_abi::config::Features;
use virtio_ism_abi::event::Event;
use virtio_ism_abi::{Gid, Status};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use zerocopy::IntoBytes;

use super::front_end::*;
use super::vfio_client::{
    Client, DMA_UNMAP, GET_INFO, GET_IRQ_INFO, REGION_WRITE, RESET, SET_IRQS, longs, word, words,
};

const DMB: u32 = 64 << 10;
/// Steps of [`Guest::step`] up to a running device.
const STEPS: usize = 8;

/// A guest under a monitor with the device by vfio-user. The driver's side is a vhost-user front end's; its
/// eventfds become accesses to registers.
struct Guest {
    driver: FrontEnd,
    client: Arc<Mutex<Client>>,
    /// One interrupt eventfd per queue.
    interrupts: Vec<OwnedFd>,
    /// Most areas mapped by the client, 0 without a window.
    areas: usize,
}

impl Deref for Guest {
    type Target = FrontEnd;
    fn deref(&self) -> &FrontEnd {
        &self.driver
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut FrontEnd {
        &mut self.driver
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.client.lock().unwrap().stream.shutdown(std::net::Shutdown::Both);
    }
}

impl Guest {
    /// A connected client before its first message.
    fn at(place: &Place, name: &str) -> Guest {
        Guest::with_areas(place, name, 0)
    }

    fn with_areas(place: &Place, name: &str, areas: usize) -> Guest {
        let client = Client::new(connected(&place.path(name)));
        // The driver has no vhost-user back end.
        let (unused, socket) = UnixStream::pair().unwrap();
        let driver =
            FrontEnd::on_rings(Frontend::from_stream(unused, QUEUES as u64), socket, false);
        let interrupt = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let interrupts = (0..QUEUES).map(|_| interrupt()).collect();
        Guest { driver, client: Arc::new(Mutex::new(client)), interrupts, areas }
    }

    fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().unwrap()
    }

    fn store(&self, at: u64, data: &[u8]) {
        self.client().write(0, at, data).unwrap();
    }

    fn status(&self) -> u8 {
        self.client().read(0, 20, 1).unwrap()[0]
    }

    /// The step with this number towards a running device.
    fn step(&mut self, step: usize) {
        match step {
            0 if self.areas > 0 => self.map_areas(),
            0 => drop(self.client().version()),
            1 => self.map_memory(),
            2 => self.take_interrupts(),
            // Reset, ACKNOWLEDGE, DRIVER.
            3 => [0, 1, 3].iter().for_each(|status| self.store(20, &[*status])),
            4 => self.accept_features(),
            5 => (0..QUEUES).for_each(|queue| self.set_queue(queue)),
            6 => {
                self.store(20, &[15]);
                assert_eq!(self.status(), 15);
            }
            _ => self.pass_events(),
        }
    }

    /// Agrees on the version, and maps the areas of the window.
    fn map_areas(&self) {
        let areas = self.areas;
        self.client().version_as(&format!(
            "{{\"capabilities\":{{\"max_msg_fds\":{areas},\"sparse_mmap_fds\":true}}}}"
        ));
        let (info, files) = self.client().region_info(4, u32::MAX);
        let long = |at: usize| u64::from_ne_bytes(*info[at..].first_chunk().unwrap());
        assert_eq!(files.len(), areas);
        for (at, file) in (48..).step_by(32).zip(files) {
            let [window_offset, fd_offset, len] = [0, 8, 16].map(|more| long(at + more));
            let request = ShmRequest { map: true, fd_offset, window_offset, len };
            self.driver.map_file(request, file);
        }
        let shown = self.client().read(0, 0x2000 + 64, 8).unwrap();
        assert_eq!(shown, long(16).to_le_bytes(), "the driver's window is the region");
    }

    fn map_memory(&self) {
        let file = self.file.as_fd();
        self.client().map(BASE, MEMORY, Some((file, 0))).unwrap();
        // A monitor's ROM, without a file.
        self.client().map(0xf_0000, 0x1_0000, None).unwrap();
    }

    fn take_interrupts(&self) {
        self.client().set_irqs(1, &self.interrupts).unwrap();
    }

    fn accept_features(&self) {
        let window = if self.areas > 0 { 0 } else { Features::WINDOW.bits() };
        let wanted = Wish::default().features & !(PROTOCOL_FEATURES | window);
        for (select, half) in [(0u32, wanted as u32), (1, (wanted >> 32) as u32)] {
            self.store(8, &select.to_le_bytes());
            self.store(12, &half.to_le_bytes());
        }
        self.store(20, &[11]);
        assert_eq!(self.status(), 11);
    }

    fn set_queue(&self, queue: usize) {
        let ring = &self.queues[queue];
        self.store(22, &(queue as u16).to_le_bytes());
        self.store(24, &QUEUE_SIZE.to_le_bytes());
        self.store(26, &(queue as u16 + 1).to_le_bytes());
        for (at, address) in [(32, ring.desc), (40, ring.avail), (48, ring.used)] {
            self.store(at, &address.to_le_bytes());
        }
        self.store(28, &1u16.to_le_bytes());
    }

    /// Turns kicks into accesses to the notification registers, and interrupts into calls, on a thread ending
    /// with the client.
    fn pass_events(&mut self) {
        let both =
            |queue: &Queue| (queue.kick.try_clone().unwrap(), queue.call.try_clone().unwrap());
        let eventfds: Vec<_> = self.queues.iter().map(both).collect();
        let interrupts: Vec<_> = self.interrupts.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let stream = self.client().stream.try_clone().unwrap();
        let epoll = Epoll::new().unwrap();
        let watch = |fd: RawFd, number: usize, events| {
            let event = EpollEvent::new(events, number as u64);
            epoll.ctl(ControlOperation::Add, fd, event).unwrap();
        };
        watch(stream.as_raw_fd(), 2 * QUEUES, EventSet::empty());
        for (queue, (kick, _)) in eventfds.iter().enumerate() {
            watch(kick.as_raw_fd(), queue, EventSet::IN);
            watch(interrupts[queue].as_raw_fd(), QUEUES + queue, EventSet::IN);
        }
        let client = self.client.clone();
        std::thread::spawn(move || {
            let mut ready = [EpollEvent::default()];
            loop {
                if epoll.wait(-1, &mut ready).is_err() {
                    continue;
                }
                let number = ready[0].data() as usize;
                if number == 2 * QUEUES {
                    return;
                }
                let (kick, call) = &eventfds[number % QUEUES];
                if number >= QUEUES {
                    rustix::io::read(&interrupts[number - QUEUES], &mut [0; 8]).unwrap();
                    call.write(1).unwrap();
                } else if kick.read().is_ok() {
                    let mut body = longs(&[0x3000 + 4 * number as u64]);
                    body.extend(words(&[0, 2]));
                    body.extend((number as u16).to_ne_bytes());
                    let mut client = client.lock().unwrap();
                    // The client may have ended meanwhile.
                    let _ = client.send_raw([REGION_WRITE, 0], [34, 0x10], &body, &[]);
                }
            }
        });
        self.driver.feed_events(32);
    }

    fn start(place: &Place, name: &str) -> (Guest, Gid) {
        Guest::start_with(place, name, 0)
    }

    fn start_with(place: &Place, name: &str, areas: usize) -> (Guest, Gid) {
        let mut guest = Guest::with_areas(place, name, areas);
        for step in 0..STEPS {
            guest.step(step);
        }
        let gid = guest.hello();
        (guest, gid)
    }
}

fn with_vfio_user(place: &Place, guests: &[&str], of_vfio_user: &[&str]) -> Daemon {
    place.daemon_with(guests, |config| {
        for guest in &mut config.guests {
            guest.vfio_user = of_vfio_user.contains(&guest.name.as_str());
        }
    })
}

fn count(daemon: &Daemon, name: &str, fault: Fault) -> u64 {
    let guests = daemon.list();
    let guest = guests.iter().find(|guest| guest.spec.name == name).unwrap();
    guest.faults[FAULTS.iter().position(|known| *known == fault).unwrap()]
}

fn no_faults(daemon: &Daemon) {
    for guest in daemon.list() {
        assert_eq!(guest.faults, [0; FAULTS.len()], "{}", guest.spec.name);
    }
}

/// Moves bytes from one to the other, and checks the event.
fn move_bytes(from: &mut FrontEnd, user: Gid, to: &mut FrontEnd) {
    let dmb = to.register_in_memory(user, 1, DMB);
    assert_eq!(from.transfer(dmb.token.get(), &[(100, b"hello")], true), Status::Ok);
    assert!(to.used(EVENTS, TIMEOUT).is_some(), "no event");
    assert_eq!(to.read_buffer(DMB_AT + 100, 5), b"hello");
}

#[test]
fn two_guests_by_vfio_user_move_bytes() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a", "b"]);
    let ((mut a, gid_a), (mut b, gid_b)) = (Guest::start(&place, "a"), Guest::start(&place, "b"));
    move_bytes(&mut a, gid_a, &mut b);
    assert_eq!(daemon.list().iter().filter(|guest| guest.device.is_some()).count(), 2);
    drop(a);
    let event = b.event(TIMEOUT);
    assert!(matches!(event, Some(Event::PeerDown { gid, .. }) if gid == gid_a), "{event:?}");

    let (mut again, gid) = Guest::start(&place, "a");
    assert_ne!(gid, gid_a);
    move_bytes(&mut b, gid_b, &mut again);
    no_faults(&daemon);
}

// cloud-hypervisor's `--user-device` reads answers of these lengths only (crate `vfio_user` 0.1.3).
#[test]
fn the_client_of_cloud_hypervisor_gets_answers_of_its_lengths_and_moves() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a"]);
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
    let mut a = Guest::at(&place, "a");
    {
        let mut client = a.client();
        client.version_as(
            "{\"capabilities\":{\"max_msg_fds\":1,\"max_data_xfer_size\":1048576,\
             \"migration\":{\"pgsize\":4096}}}",
        );
        let info = client.request(GET_INFO, &words(&[32, 0, 0, 0]), &[]).unwrap();
        assert_eq!(info.len(), 16);
        for region in 0..word(&info, 8) {
            let (info, files) = client.region_info(region, 32);
            assert_eq!((info.len(), word(&info, 0), files.len()), (32, 32, 0));
            assert_eq!(word(&info, 4) & 4, 0, "nothing is mapped");
        }
        for kind in 0..=2 {
            let info = client.request(GET_IRQ_INFO, &words(&[16, 0, kind, 0]), &[]).unwrap();
            assert_eq!(info.len(), 16);
        }
        let none = client.request(SET_IRQS, &words(&[20, 0x21, 2, 0, 0]), &[]);
        assert_eq!(none, Ok(Vec::new()));
    }
    (1..STEPS).for_each(|step| a.step(step));
    let gid_a = a.hello();
    move_bytes(&mut a, gid_a, &mut b);
    move_bytes(&mut b, gid_b, &mut a);
    let memory = [words(&[24, 0]), longs(&[BASE, MEMORY])].concat();
    assert_eq!(a.client().request(DMA_UNMAP, &memory, &[]).unwrap().len(), 24);
    no_faults(&daemon);
}

/// Registers a DMB of `len` bytes in the window of `to`, and attaches the DMB at `from`.
fn share(from: &mut FrontEnd, user: Gid, to: &mut FrontEnd, [idx, len]: [u32; 2]) -> (u64, u64) {
    let dmb = to.register(user, idx, len, BACKING_WINDOW);
    let seen = from.attach(dmb.token.get());
    assert_eq!(seen.flags & attach_flags::MOVE_ONLY, 0);
    (dmb.dmb_off.get(), seen.dmb_off.get())
}

#[test]
fn two_guests_by_vfio_user_share_a_window_of_areas() {
    const LEN: u32 = 8 << 20;
    /// 600 MB each way.
    const ROUNDS: u8 = 75;
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a", "b"]);
    let (mut a, gid_a) = Guest::start_with(&place, "a", 16);
    let (mut b, gid_b) = Guest::start_with(&place, "b", 16);
    let there = share(&mut a, gid_a, &mut b, [0, LEN]);
    let back = share(&mut b, gid_b, &mut a, [0, LEN]);
    for round in 0..ROUNDS {
        for (to, from, (own, seen)) in [(&b, &a, there), (&a, &b, back)] {
            // A length prime to the length of pages.
            let part: Vec<u8> = (0..251).map(|at| at ^ round ^ own as u8).collect();
            let bytes = part.repeat(LEN as usize / part.len());
            from.write_window(seen, &bytes);
            assert!(to.read_window(own, bytes.len()) == bytes, "round {round}");
        }
    }
    // A driver that begins anew finds the same areas, and no old bytes.
    a.clear_rings();
    (3..=6).for_each(|step| a.step(step));
    a.feed_events(32);
    let gid_a = a.hello();
    let (own, seen) = share(&mut b, gid_b, &mut a, [1, DMB]);
    assert_eq!(a.read_window(own, DMB as usize), vec![0; DMB as usize]);
    b.write_window(seen, b"anew");
    assert_eq!(a.read_window(own, 4), b"anew");
    let (own, seen) = share(&mut a, gid_a, &mut b, [1, DMB]);
    a.write_window(seen, b"and back");
    assert_eq!(b.read_window(own, 8), b"and back");
    no_faults(&daemon);
}

#[test]
fn areas_reach_processes_too_and_a_guest_without_a_free_one_moves() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b", "c"], &["a"]);
    let (mut a, gid_a) = Guest::start_with(&place, "a", 1);
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
    let (own, seen) = share(&mut b, gid_b, &mut a, [1, DMB]);
    b.write_window(seen, b"to the guest");
    assert_eq!(a.read_window(own, 12), b"to the guest");
    // The second slab of the pair does not begin with the file of the pair.
    let (own, seen) = share(&mut a, gid_a, &mut b, [1, DMB]);
    a.write_window(seen, b"from the guest");
    assert_eq!(b.read_window(own, 14), b"from the guest");
    assert_ne!(b.shm_requests()[1].fd_offset, 0);

    let (mut c, gid_c) = FrontEnd::greet(&place.path("c"));
    let request = register_request(gid_c, 3, DMB, BACKING_WINDOW);
    assert_eq!(a.command(Op::Register, request.as_bytes()).0, Status::Enospc);
    move_bytes(&mut a, gid_a, &mut c);
    no_faults(&daemon);
}

#[test]
fn a_client_that_overwrites_its_areas_and_resizes_them_reaches_no_other_pair() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b", "c"], &["a", "b", "c"]);
    let [(mut a, gid_a), (mut b, gid_b), (mut c, gid_c)] =
        ["a", "b", "c"].map(|name| Guest::start_with(&place, name, 4));
    let (own, seen) = share(&mut c, gid_c, &mut b, [1, DMB]);
    c.write_window(seen, b"of others");
    let (at_b, at_a) = share(&mut a, gid_a, &mut b, [2, DMB]);
    // Files of the areas come with every answer.
    let (_, files) = a.client().region_info(4, u32::MAX);
    let files: Vec<File> = files.into_iter().map(File::from).collect();
    assert_eq!(files.len(), 4);
    for file in &files {
        let len = file.metadata().unwrap().len();
        for other in [0, len - 4096, len + 4096] {
            assert_eq!(file.set_len(other).unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        assert_eq!(fcntl_add_seals(file, SealFlags::WRITE), Err(Errno::PERM));
        for at in (0..len).step_by(1 << 20) {
            file.write_all_at(&[0xff; 1 << 16], at).unwrap();
        }
    }
    assert_eq!(b.read_window(own, 9), b"of others");
    let (own, seen) = share(&mut b, gid_b, &mut c, [3, DMB]);
    assert_eq!(c.read_window(own, DMB as usize), vec![0; DMB as usize]);
    b.write_window(seen, b"and back");
    assert_eq!(c.read_window(own, 8), b"and back");
    a.write_window(at_a, b"of the pair");
    assert_eq!(b.read_window(at_b, 11), b"of the pair");
    no_faults(&daemon);
}

#[test]
fn a_guest_keeps_its_bytes_in_the_window_when_the_daemon_has_gone() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a", "b"]);
    let (mut a, gid_a) = Guest::start_with(&place, "a", 2);
    let (mut b, _) = Guest::start_with(&place, "b", 2);
    let (own, seen) = share(&mut a, gid_a, &mut b, [1, DMB]);
    drop(daemon);
    a.write_window(seen, b"still here");
    assert_eq!(b.read_window(own, 10), b"still here");
}

#[test]
fn a_guest_by_vfio_user_reaches_one_by_vhost_user() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a"]);
    let ((mut a, gid_a), (mut b, gid_b)) =
        (Guest::start(&place, "a"), FrontEnd::greet(&place.path("b")));
    move_bytes(&mut a, gid_a, &mut b);
    move_bytes(&mut b, gid_b, &mut a);
    no_faults(&daemon);
}

#[test]
fn a_driver_that_resets_the_function_begins_anew() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a"]);
    let (mut a, first) = Guest::start(&place, "a");
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
    move_bytes(&mut a, first, &mut b);
    a.clear_rings();
    (3..=6).for_each(|step| a.step(step));
    let event = b.event(TIMEOUT);
    assert!(matches!(event, Some(Event::PeerDown { gid, .. }) if gid == first), "{event:?}");
    a.feed_events(32);
    assert_ne!(a.hello(), first);
    move_bytes(&mut b, gid_b, &mut a);
    no_faults(&daemon);
}

#[test]
fn a_device_that_the_daemon_ends_comes_back_by_a_reset() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a"], &["a"]);
    let (mut a, first) = Guest::start(&place, "a");
    // A pipe instead of an eventfd.
    let (_pipe, end) = std::io::pipe().unwrap();
    a.client().request(SET_IRQS, &words(&[20, 0x24, 2, 3, 1]), &[end.as_fd()]).unwrap();
    eventually("the end of the device", || a.status() & 64 != 0);
    assert_eq!(count(&daemon, "a", Fault::NotEventfd), 1);
    a.take_interrupts();
    a.clear_rings();
    (3..=6).for_each(|step| a.step(step));
    a.feed_events(32);
    assert_ne!(a.hello(), first);
}

#[test]
fn a_client_may_go_after_each_step_and_the_next_one_is_served() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a"], &["a"]);
    for steps in 0..=STEPS {
        let mut guest = Guest::at(&place, "a");
        (0..steps).for_each(|step| guest.step(step));
    }
    let (guest, _) = Guest::start(&place, "a");
    no_faults(&daemon);
    drop(guest);
    eventually("the end of all threads", || {
        daemon.list().iter().all(|guest| guest.hanging == 0 && guest.device.is_none())
    });
}

#[test]
fn a_client_that_lies_is_counted_and_the_next_one_is_served() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a"], &["a"]);
    let guest = Guest::at(&place, "a");
    guest.client().version();
    assert!(guest.client().read(0, 1 << 40, 4).is_err());
    assert_eq!(count(&daemon, "a", Fault::BadMessage), 1);
    guest.client().send_raw([4, 1], [u32::MAX, 0], &[], &[]).unwrap();
    eventually("the end of the client", || count(&daemon, "a", Fault::BadMessage) == 2);
    // A front end of the other protocol.
    drop(guest);
    let other = connected(&place.path("a"));
    let vhost = Frontend::from_stream(other, QUEUES as u64);
    assert!(vhost::VhostBackend::get_features(&vhost).is_err());
    drop(vhost);
    Guest::start(&place, "a");
}

#[test]
fn a_guest_that_is_removed_loses_its_client() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a"], &["a"]);
    let (a, _) = Guest::start(&place, "a");
    let idle = a.client().stream.try_clone().unwrap();
    daemon.remove_guest("a").unwrap();
    let mut end = [PollFd::new(&idle, PollFlags::empty())];
    poll(&mut end, None).unwrap();
    assert!(end[0].revents().contains(PollFlags::HUP));
}

/// Mappings of a file in this process: one is the driver's, the others are the daemon's.
fn mappings(file: &File) -> usize {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
}

#[test]
fn memory_is_the_clients_alone_when_it_is_unmapped_or_no_queue_runs() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["a"]);
    let (mut b, gid_b) = FrontEnd::greet(&place.path("b"));
    let mut a = Guest::at(&place, "a");
    (0..STEPS).for_each(|step| a.step(step));
    for round in 0..3 {
        a.hello();
        move_bytes(&mut b, gid_b, &mut a);
        assert_eq!(mappings(&a.file), 2);
        let more = memfd(0x1000, true);
        a.client().map(1 << 40, 0x1000, Some((more.as_fd(), 0))).unwrap();
        assert_eq!(mappings(&more), 1);
        a.client().unmap(1 << 40, 0x1000).unwrap();
        assert_eq!((mappings(&more), mappings(&a.file), a.status()), (0, 2, 15));
        match round {
            0 => {
                a.client().unmap(BASE, MEMORY).unwrap();
                assert_ne!(a.status() & 64, 0, "it needs a reset");
            }
            1 => a.store(20, &[0]),
            _ => drop(a.client().request(RESET, &[], &[]).unwrap()),
        }
        assert_eq!(mappings(&a.file), 1, "round {round}");
        if round == 0 {
            let file = a.file.try_clone().unwrap();
            a.client().map(BASE, MEMORY, Some((file.as_fd(), 0))).unwrap();
            assert_eq!(mappings(&a.file), 1, "not before a queue runs");
        }
        a.clear_rings();
        (3..=6).for_each(|step| a.step(step));
        a.feed_events(32);
    }
    no_faults(&daemon);
}

#[test]
fn an_interrupt_waits_until_its_vector_has_an_eventfd() {
    let place = Place::new();
    let daemon = with_vfio_user(&place, &["a", "b"], &["b"]);
    let ((mut a, gid_a), (mut b, _)) =
        (FrontEnd::greet(&place.path("a")), Guest::start(&place, "b"));
    let dmb = b.register_in_memory(gid_a, 1, DMB);
    let vector = EVENTS as u32 + 1;
    for round in 0..10 {
        b.want_call(EVENTS);
        b.client().request(SET_IRQS, &words(&[20, 0x24, 2, vector, 1]), &[]).unwrap();
        assert_eq!(a.transfer(dmb.token.get(), &[(0, b"hello")], true), Status::Ok);
        let bits = || b.client().read(2, 0x800, 8).unwrap()[0];
        eventually("the pending bit", || bits() == 1 << vector);
        b.client().set_irqs(vector, &b.interrupts[EVENTS..=EVENTS]).unwrap();
        assert!(b.wait_call(EVENTS, TIMEOUT), "round {round}");
        assert_eq!(bits(), 0);
        assert!(b.used(EVENTS, TIMEOUT).is_some(), "no event");
        b.feed_events(1);
    }
    no_faults(&daemon);
}
