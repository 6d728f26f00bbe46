// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lying, shrinking or absent guest memory.

use std::os::fd::AsRawFd;

use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserProtocolFeatures as Protocol;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vhost_device_ism::vhost::{FAULTS, Fault};
use virtio_ism_abi::Status;
use virtio_ism_abi::command::Op;
use virtio_ism_abi::event::Event;

use super::front_end::*;
use super::hostile::Stage;

const DMB: u32 = 64 << 10;

#[test]
fn memory_on_a_disk_is_refused_unless_allowed() {
    let mut stage = Stage::new();
    let Some(file) = file_on_disk() else {
        eprintln!("SKIPPED: the build directory is on tmpfs");
        return;
    };
    let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
    a.file = file.try_clone().unwrap();
    assert!(a.try_set_memory().is_err());
    stage.await_count(Fault::RefusedMemory, 1);
    stage.check_others();
    stage.check_reconnect();

    let place = Place::new();
    let _daemon = place.daemon_with(&["a"], |config| config.guests[0].allow_any_file = true);
    let mut a = FrontEnd::negotiate(&place.path("a"), &Wish::default());
    a.file = file;
    a.set_memory();
}

/// A file of 4 MiB outside memory; `None` with a build directory on tmpfs.
fn file_on_disk() -> Option<std::fs::File> {
    let path = std::env::current_exe().unwrap().with_extension("memory");
    let mut options = std::fs::File::options();
    let file = options.read(true).write(true).create(true).truncate(false).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(4 << 20).unwrap();
    let tmpfs = 0x0102_1994;
    (rustix::fs::fstatfs(&file).unwrap().f_type != tmpfs).then_some(file)
}

#[test]
fn more_memory_than_the_quota_is_refused() {
    let place = Place::new();
    let daemon = place.daemon_with(&["a"], |config| {
        config.fabrics[0].quotas.max_guest_memory = Some((4 << 20) - 1);
    });
    let mut a = FrontEnd::negotiate(&place.path("a"), &Wish::default());
    assert!(a.try_set_memory().is_err());
    let faults = daemon.list()[0].faults;
    assert_eq!(faults[FAULTS.iter().position(|f| *f == Fault::RefusedMemory).unwrap()], 1);
}

#[test]
fn memory_that_is_cut_short_ends_its_own_connection() {
    let mut stage = Stage::new();
    let wish = Wish { sealed: false, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
    a.hello();
    rustix::fs::ftruncate(&a.file, 0).unwrap();
    for queue in 0..QUEUES {
        a.kick(queue);
    }
    stage.wait_for(Fault::LostMemory);
    a.wait_cut();
    stage.check_others();
    stage.check_reconnect();
}

#[test]
fn a_peer_survives_moves_into_memory_that_is_gone() {
    let mut stage = Stage::new();
    let wish = Wish { sealed: false, ..Wish::default() };
    let mut a = FrontEnd::connect_with(&stage.place.path("a"), wish);
    let gid_a = a.hello();
    let (mut b, gid_b) = FrontEnd::greet(&stage.place.path("b"));
    let token = a.register_in_memory(gid_b, 1, DMB).token.get();
    b.attach(token);
    rustix::fs::ftruncate(&a.file, 0).unwrap();
    let _ = b.transfer(token, &[(0, b"into the void")], false);
    stage.wait_for(Fault::LostMemory);
    a.wait_cut();
    let gone = loop {
        match b.event(TIMEOUT) {
            Some(Event::PeerDown { gid, .. }) => break gid,
            Some(_) => {}
            None => panic!("nobody told the peer"),
        }
    };
    assert_eq!(gone, gid_a);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok, "the peer goes on");
    stage.check_others();
    stage.check_reconnect();
}

#[test]
fn huge_pages_that_are_not_there_end_their_own_connection() {
    let mut stage = Stage::new();
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::CLOEXEC;
    let Ok(file) = rustix::fs::memfd_create("huge", flags).map(std::fs::File::from) else {
        eprintln!("SKIPPED: this kernel has no huge pages");
        return;
    };
    file.set_len(4 << 20).unwrap();
    let free = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = free.lines().find(|line| line.starts_with("HugePages_Free:")).unwrap();
    if !free.ends_with(" 0") {
        eprintln!("SKIPPED: the pool of huge pages is not empty");
        return;
    }
    let mut a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
    a.file = file;
    a.set_memory();
    // The daemon reads the used index, on a missing page.
    a.try_set_addresses(CONTROL).ok();
    stage.wait_for(Fault::LostMemory);
    a.wait_cut();
    stage.check_others();
    stage.check_reconnect();
}

#[test]
fn memory_swapped_for_one_that_shrinks_ends_its_own_connection() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    // While the rings run: a table on a file cut short at once.
    a.file = memfd(4 << 20, false);
    let _ = a.try_set_memory();
    rustix::fs::ftruncate(&a.file, 0).unwrap();
    for queue in 0..QUEUES {
        a.kick(queue);
    }
    a.wait_cut();
    stage.check_others();
    stage.check_reconnect();
}

/// Moves of a page each, out of untouched memory. `None`: the connection was cut.
fn move_out_of_holes(a: &mut FrontEnd, token: u64, pages: u64) -> Option<()> {
    let mut head = token.to_le_bytes().to_vec();
    head.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0]);
    head.extend_from_slice(&[0, 0, 0, 0, 0, 16, 0, 0]);
    let (at, status) = (a.write_buffer(&head), a.buffer(4));
    // Beyond the buffers written by the test itself.
    let hole = a.buffer(4096).next_multiple_of(4096) + 4096;
    for page in 0..pages {
        let payload = (hole + page * 4096, 4096, false);
        a.add(MOVES, &[(at, head.len() as u32, false), payload, (status, 4, true)]);
        a.kick(MOVES);
        a.used(MOVES, std::time::Duration::from_secs(1))?;
        assert_eq!(a.read_buffer(status, 2), Status::Ok.code().to_le_bytes());
    }
    Some(())
}

#[test]
fn memory_with_holes_is_on_its_guests_account() {
    if ism_device::shm::userfault().is_none() {
        eprintln!("SKIPPED: this kernel has no userfaultfd");
        return;
    }
    let place = Place::new();
    let daemon = place.daemon_with(&["a", "b"], |config| {
        config.fabrics[0].quotas.max_touched_bytes = Some(1 << 20);
    });
    let touched = || daemon.list()[0].touched_bytes;
    let faults = |name: &str| {
        let guests = daemon.list();
        let guest = guests.iter().find(|guest| guest.spec.name == name).unwrap();
        guest.faults[FAULTS.iter().position(|f| *f == Fault::SparseMemory).unwrap()]
    };
    let blocks = |a: &FrontEnd| rustix::fs::fstat(&a.file).unwrap().st_blocks as u64 * 512;
    let (mut b, _) = FrontEnd::greet(&place.path("b"));

    // A guest with holes works.
    let (mut a, gid_a) = FrontEnd::greet(&place.path("a"));
    let dmb = b.register(gid_a, 1, DMB, virtio_ism_abi::command::BACKING_WINDOW);
    move_out_of_holes(&mut a, dmb.token.get(), 100).unwrap();
    let used = touched();
    assert!((100 * 4096..=110 * 4096).contains(&used), "{used}");
    // But not beyond its quota.
    let before = blocks(&a);
    let all = move_out_of_holes(&mut a, dmb.token.get(), 400);
    assert_eq!(all, None);
    a.wait_cut();
    eventually("a fault", || faults("a") == 1);
    assert!(blocks(&a) <= before + (1 << 20), "{} bytes more", blocks(&a) - before);
    // Another connection of the guest has the same quota.
    let mut a = FrontEnd::negotiate(&place.path("a"), &Wish::default());
    a.set_memory();
    // The daemon reads the untouched used ring.
    a.try_set_addresses(CONTROL).ok();
    a.wait_cut();
    eventually("another fault", || faults("a") == 2);
    assert!(touched() <= 1 << 20);
    assert_eq!(b.command(Op::Stats, &[]).0, Status::Ok);
    assert_eq!(faults("b"), 0);
}

#[test]
fn memory_tables_that_are_refused_leave_no_mapping() {
    let mut stage = Stage::new();
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::CLOEXEC;
    let Ok(file) = rustix::fs::memfd_create("refused-table", flags).map(std::fs::File::from) else {
        eprintln!("SKIPPED: this kernel has no huge pages");
        return;
    };
    file.set_len(4 << 20).unwrap();
    let region = |guest_phys_addr, memory_size| VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size,
        userspace_addr: guest_phys_addr,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let odd = region(0x10_0000, 0x1000);
    let over = region(0x10_0800, 0x1000);
    let beyond = region(u64::MAX - 0x7ff, 0x1000);
    // Refused by the daemon; by the framework, once everything is mapped; and at the mapping of the second.
    for table in [vec![odd], vec![odd, over], vec![odd, beyond]] {
        for _ in 0..5 {
            let a = FrontEnd::negotiate(&stage.place.path("a"), &Wish::default());
            assert!(a.vhost.set_mem_table(&table).is_err(), "{}", table.len());
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let left: Vec<&str> = maps.lines().filter(|line| line.contains("refused-table")).collect();
    assert!(left.is_empty(), "{left:#?}");
    stage.check_others();
    stage.check_reconnect();
}

#[test]
fn memory_that_is_given_by_regions_ends_its_own_connection() {
    let mut stage = Stage::new();
    let (mut a, _) = stage.attacker();
    // The daemon does not offer the feature, and the framework does not check against the offered ones.
    let accepted = a.vhost.get_protocol_features().unwrap() | Protocol::CONFIGURE_MEM_SLOTS;
    a.vhost.set_protocol_features(accepted).unwrap();
    let file = memfd(0x1000, true);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 40,
        memory_size: 0x1000,
        userspace_addr: 1 << 40,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    assert!(a.vhost.add_mem_region(&region).is_err());
    stage.await_count(Fault::RefusedMemory, 1);
    a.wait_cut();
    stage.check_others();
    stage.check_reconnect();
}
