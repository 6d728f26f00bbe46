// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Device pools: one socket for many front ends.

use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, socket_with,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use vhost_device_ism::management::Client;
use vhost_device_ism::{Daemon, config::GuestSpec};
use virtio_ism_abi::command::{BACKING_WINDOW, Op};
use virtio_ism_abi::event::{Event, LeaveReason};
use virtio_ism_abi::{Gid, PoolAnswer, PoolStatus, Status};
use zerocopy::{FromBytes, IntoBytes};

use super::front_end::*;

/// Asks the pool for a device.
pub(crate) fn ask(path: &Path) -> Result<UnixStream, PoolStatus> {
    let pool = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let pool = pool.unwrap();
    connect(&pool, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let mut bytes = [0; 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(&pool, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags);
    let answer = PoolAnswer::read_from_bytes(&bytes[..received.unwrap().bytes]).unwrap();
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match answer.status().unwrap() {
        PoolStatus::Granted => Ok(fds.pop().unwrap().into()),
        refused => {
            assert!(fds.is_empty());
            Err(refused)
        }
    }
}

/// Like [`ask`], until a device is granted.
fn ask_until(path: &Path) -> UnixStream {
    let mut granted = ask(path);
    eventually("a device", || {
        granted.is_ok() || {
            granted = ask(path);
            false
        }
    });
    granted.unwrap()
}

pub(crate) fn front_end(socket: UnixStream) -> (FrontEnd, Gid) {
    let mut front_end = FrontEnd::negotiate_on(socket, &Wish::default());
    front_end.set_memory();
    (0..QUEUES).for_each(|queue| front_end.start_queue(queue, 0));
    front_end.feed_events(32);
    let gid = front_end.hello();
    (front_end, gid)
}

fn pool(place: &Place, devices: u32, change: impl FnOnce(&mut GuestSpec)) -> Daemon {
    place.daemon_with(&[], |config| {
        let mut spec = GuestSpec::new(place.path("any.sock"));
        spec.devices = Some(devices);
        change(&mut spec);
        config.guests.push(spec);
        config.management = Some(place.path("m"));
    })
}

/// Time for drivers that do not answer.
const MOMENT: std::time::Duration = std::time::Duration::from_millis(1);

/// Whether the device takes on a DMB.
fn takes_on(front_end: &mut FrontEnd, user: Gid, index: u32) -> bool {
    let request = register_request(user, index, 65536, BACKING_WINDOW);
    match front_end.command(Op::Register, request.as_bytes()).0 {
        Status::Ok => true,
        Status::Estate => false,
        status => panic!("{status:?}"),
    }
}

#[test]
fn a_drained_pool_is_drained_for_later_front_ends_until_its_undrain() {
    let place = Place::new();
    let daemon = pool(&place, 8, |_| ());
    let path = place.path("any.sock");
    let (mut early, user) = front_end(ask(&path).unwrap());
    let state = || Client::connect(place.path("m")).unwrap().list().unwrap()[0].leaving;
    for round in 0..2 {
        assert!(takes_on(&mut early, user, 2 * round) && !state());
        daemon.drain("any", LeaveReason::Drain, MOMENT).unwrap();
        let (mut late, _) = front_end(ask(&path).unwrap());
        assert!(matches!(
            late.event(TIMEOUT),
            Some(Event::Leave { reason: LeaveReason::Drain, .. })
        ));
        assert!(!takes_on(&mut late, user, 1) && !takes_on(&mut early, user, 99) && state());
        assert_eq!(daemon.undrain("any").unwrap(), 2);
        assert!(takes_on(&mut late, user, 1) && takes_on(&mut early, user, 2 * round + 1));
        assert_eq!(daemon.undrain("any").unwrap(), 0);
    }
    // A virtual machine that has moved away may be followed by another one.
    daemon.drain("any", LeaveReason::Migration, MOMENT).unwrap();
    let (mut late, _) = front_end(ask(&path).unwrap());
    assert!(takes_on(&mut late, user, 1) && !takes_on(&mut early, user, 99) && !state());
}

/// Runs `work` in a network namespace of its own. `false`: not permitted for this user; a pipeline must be
/// permitted.
fn in_another_namespace(work: impl FnOnce() + Send + 'static) -> bool {
    let thread = std::thread::spawn(|| {
        // SAFETY: this thread only leaves the network namespace, and still shares the table of descriptors.
        let moved = unsafe { unshare_unsafe(UnshareFlags::NEWNET) };
        moved.is_ok().then(work).is_some()
    });
    let done = thread.join().unwrap();
    if !done {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "no network namespace can be made");
        let _ = writeln!(std::io::stderr(), "NOT TESTED: this user may make no network namespace");
    }
    done
}

#[test]
fn each_connection_of_a_pool_is_a_device_of_its_own() {
    let place = Place::new();
    let daemon = pool(&place, 8, |_| ());
    let path = place.path("any.sock");
    let (mut a, gid_a) = front_end(ask(&path).unwrap());
    let (mut b, gid_b) = front_end(ask(&path).unwrap());
    assert_ne!(gid_a, gid_b);
    let token = b.register(gid_a, 1, 65536, BACKING_WINDOW).token.get();
    assert_eq!(a.transfer(token, &[(0, b"hello")], false), Status::Ok);
    // A device of its own: the DMB is only for the other one.
    assert_eq!(b.transfer(token, &[(0, b"hello")], false), Status::Enoent);

    let guests = Client::connect(place.path("m")).unwrap().list().unwrap();
    let names: Vec<_> = guests.iter().map(|guest| guest.name.as_str()).collect();
    assert_eq!(names, ["any", "any/1", "any/2"]);
    assert_eq!((guests[0].devices, guests[0].devices_in_use), (Some(8), Some(2)));
    assert_eq!((guests[0].connected, guests[0].connections), (true, 2));
    assert_eq!(guests[1].gid.as_deref(), Some(gid_a.to_string().as_str()));
    assert_eq!((guests[1].counts.moves, guests[2].dmbs), (1, 1));
    let own = Some(std::process::id().cast_signed());
    assert_eq!((guests[2].pid, guests[2].pool.as_deref()), (own, Some("any")));

    // Each front end sees the end of the other, and the device is free.
    drop(a);
    eventually("the end of a device", || daemon.list().len() == 2);
    assert_eq!(daemon.list()[0].ended.counts.moves, 1);
    assert!(daemon.metrics().contains("ism_moves_total{guest=\"any\",chid=\"ff00\"} 1"));
    daemon.remove_guest("any").unwrap();
    b.wait_cut();
    assert!(!path.exists());
}

#[test]
fn a_network_namespace_gets_half_of_the_devices_and_the_next_one_half_of_the_rest() {
    let place = Place::new();
    let daemon = pool(&place, 8, |_| ());
    let path = place.path("any.sock");
    let own: Vec<_> = (0..4).map(|_| ask(&path).unwrap()).collect();
    assert_eq!(ask(&path).err(), Some(PoolStatus::ShareInUse));
    let (sender, receiver) = std::sync::mpsc::channel();
    let other = path.clone();
    let tested = in_another_namespace(move || {
        let theirs: Vec<_> = (0..2).map(|_| ask(&other).unwrap()).collect();
        assert_eq!(ask(&other).err(), Some(PoolStatus::ShareInUse));
        // A flood keeps no other process from the free devices.
        for _ in 0..1000 {
            assert_eq!(ask(&other).err(), Some(PoolStatus::ShareInUse));
        }
        sender.send(theirs).unwrap();
    });
    if tested {
        let theirs = receiver.recv().unwrap();
        let names: Vec<_> = daemon.list().into_iter().filter_map(|guest| guest.member).collect();
        assert_eq!(names.len(), 6);
        assert_ne!(names[0].network_namespace, names[5].network_namespace);
        drop(theirs);
    }
    // Returned devices are available again.
    drop(own);
    eventually("the end of all", || daemon.list()[0].pool.as_ref().unwrap().in_use == 0);
    let again: Vec<_> = (0..4).map(|_| ask(&path).unwrap()).collect();
    assert_eq!(again.len(), 4);
}

/// Runs `work` on a thread of another user; `None`: not permitted for this user.
fn as_user<T: Send + 'static>(uid: u32, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let thread = std::thread::spawn(move || {
        let uid = rustix::thread::Uid::from_raw(uid);
        // Only for this thread: in the kernel, each thread has its own users.
        rustix::thread::set_thread_res_uid(uid, uid, uid).ok()?;
        Some(work())
    });
    thread.join().unwrap()
}

/// A pool accessible to all users.
fn pool_for_all(place: &Place, devices: u32) -> Daemon {
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::Permissions::from_mode(0o711);
    std::fs::set_permissions(place.path("x").parent().unwrap(), mode).unwrap();
    pool(place, devices, |spec| spec.mode = Some(0o666))
}

/// Takes every device a process can get.
fn take_all(path: &Path) -> Vec<UnixStream> {
    std::iter::from_fn(|| ask(path).ok()).collect()
}

#[test]
fn a_user_that_takes_its_share_leaves_devices_for_other_users_of_its_namespace() {
    let place = Place::new();
    let daemon = pool_for_all(&place, 16);
    let [first, second, third] = [(); 3].map(|()| place.path("any.sock"));
    let Some(theirs) = as_user(2001, move || take_all(&first)) else {
        eprintln!("SKIPPED: only root can become another user");
        return;
    };
    assert_eq!(theirs.len(), 8, "half of all");
    let others = as_user(2002, move || take_all(&second)).unwrap();
    let more = as_user(2003, move || take_all(&third)).unwrap();
    assert!(!others.is_empty() && !more.is_empty(), "{} {}", others.len(), more.len());
    let users: Vec<_> = daemon.list().into_iter().filter_map(|guest| guest.member).collect();
    assert_eq!((users[0].uid, users[8].uid), (Some(2001), Some(2002)));
}

#[test]
fn a_user_that_makes_namespaces_gets_no_more_than_leaves_some_for_others() {
    let place = Place::new();
    let _daemon = pool_for_all(&place, 16);
    let mut theirs = Vec::new();
    for _ in 0..12 {
        let (sender, receiver) = std::sync::mpsc::channel();
        let path = place.path("any.sock");
        let tested = in_another_namespace(move || {
            let taken = as_user(2001, move || take_all(&path));
            sender.send(taken.unwrap_or_default()).unwrap();
        });
        if !tested {
            return;
        }
        theirs.extend(receiver.recv().unwrap());
    }
    assert_eq!(theirs.len(), 12, "three quarters at most");
    let path = place.path("any.sock");
    assert!(!as_user(2002, move || take_all(&path)).unwrap().is_empty());
    assert!(ask(&place.path("any.sock")).is_ok(), "and one of root's");
}

#[test]
fn a_flood_of_clients_that_leave_makes_few_devices_and_delays_nobody() {
    let place = Place::new();
    let daemon = pool(&place, 8, |_| ());
    let path = place.path("any.sock");
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flood = {
        let (path, stop) = (path.clone(), stop.clone());
        move || {
            let address = SocketAddrUnix::new(&path).unwrap();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let flags = SocketFlags::CLOEXEC;
                let pool = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
                let _ = connect(pool.unwrap(), &address);
            }
        }
    };
    // In another namespace if possible: in this one, the flood would count for the test itself.
    let tested = std::thread::spawn(move || in_another_namespace(flood));
    let start = std::time::Instant::now();
    let mut made = 0;
    while start.elapsed() < std::time::Duration::from_secs(2) {
        made = daemon.list()[0].connections;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let granted = ask(&path);
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    if tested.join().unwrap() {
        assert!(granted.is_ok(), "{granted:?}");
    }
    // Half of eight devices, ten times a second, and some scatter.
    assert!(made <= 100, "{made} devices in two seconds");
}

#[test]
fn the_last_device_goes_to_whoever_has_none() {
    let place = Place::new();
    let _daemon = pool(&place, 2, |_| ());
    let path = place.path("any.sock");
    let _own = ask(&path).unwrap();
    assert_eq!(ask(&path).err(), Some(PoolStatus::ShareInUse));
    let other = path.clone();
    let tested = in_another_namespace(move || {
        let _theirs = ask(&other).unwrap();
        assert_eq!(ask(&other).err(), Some(PoolStatus::AllInUse));
    });
    if tested {
        // Free again by the end of the other process.
        eventually("a refusal of the share", || ask(&path).err() == Some(PoolStatus::ShareInUse));
    }
}

#[test]
fn a_pool_for_one_user_or_group_refuses_others() {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for (peer_uid, peer_gid, granted) in [
        (Some(uid), Some(gid), true),
        (Some(uid + 1), None, false),
        (None, Some(gid + 1), false),
        (Some(uid), Some(gid + 1), false),
    ] {
        let place = Place::new();
        let daemon = pool(&place, 4, |spec| {
            (spec.peer_uid, spec.peer_gid) = (peer_uid, peer_gid);
        });
        let answer = ask(&place.path("any.sock"));
        match granted {
            true => assert!(answer.is_ok()),
            false => {
                assert_eq!(answer.err(), Some(PoolStatus::NotPermitted));
                assert_eq!(daemon.list()[0].pool.as_ref().unwrap().refused, 1);
                let guests = Client::connect(place.path("m")).unwrap().list().unwrap();
                assert_eq!(guests[0].faults.get("refused_connection"), Some(&1));
            }
        }
    }
}

#[test]
fn clients_that_leave_before_or_after_the_answer_cost_no_device() {
    let place = Place::new();
    let daemon = pool(&place, 4, |_| ());
    let path = place.path("any.sock");
    for _ in 0..50 {
        drop(ask_until(&path));
    }
    for _ in 0..50 {
        let flags = SocketFlags::CLOEXEC;
        let pool = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&pool, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    }
    eventually("the end of all", || daemon.list()[0].pool.as_ref().unwrap().in_use == 0);
    // Some clients may still have been in the queue.
    let (_a, _) = front_end(ask_until(&path));
}

#[test]
fn a_front_end_that_hangs_keeps_its_place_and_no_other() {
    let place = Place::new();
    let daemon = pool(&place, 4, |_| ());
    let path = place.path("any.sock");
    let pool_of = |daemon: &Daemon| daemon.list().remove(0);
    let (mut hanging, _) = front_end(ask(&path).unwrap());
    super::hostile::fill_call_counter(&mut hanging);
    let call = hanging.queues[CONTROL].call.try_clone().unwrap();
    drop(hanging);
    eventually("a hanging thread", || pool_of(&daemon).hanging == 1);
    assert_eq!(pool_of(&daemon).pool.unwrap().in_use, 1);
    let (_a, _) = front_end(ask(&path).unwrap());
    assert_eq!(ask(&path).err(), Some(PoolStatus::ShareInUse), "it has two of four");
    call.read().unwrap();
    eventually("the end of the thread", || pool_of(&daemon).pool.unwrap().in_use == 1);
}

#[test]
fn an_ordinary_front_end_is_told_that_a_pool_is_no_device() {
    let place = Place::new();
    let _daemon = pool(&place, 4, |_| ());
    let refused = UnixStream::connect(place.path("any.sock")).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EPROTOTYPE));
}

#[test]
fn the_unit_of_systemd_has_the_users_of_the_host() {
    let unit = include_str!("../../systemd/vhost-device-ism.service");
    assert!(unit.lines().any(|line| line == "PrivateUsers=no"));
}

#[test]
fn a_daemon_that_cannot_see_a_user_refuses_to_ask_for_it() {
    let place = Place::new();
    for setting in ["peer-uid=2001", "peer-uid=65534", "peer-gid=36"] {
        let socket = format!("{},devices=4,{setting}", place.path("any.sock").display());
        let unshare = smc_test_support::unshare(&["--user", "--map-root-user"]);
        let Some(mut command) = unshare else { return };
        command.args([super::program::PROGRAM, "--check-config", "--socket-path", &socket]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{setting}: this process cannot tell")), "{said}");
    }
}
