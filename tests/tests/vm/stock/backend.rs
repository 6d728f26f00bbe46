// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vhost-user backend only mapping and unmapping on a test's request.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ism_sys::{lock, sealed_memfd};
use smc_tests::vm::probe::{SLOT, mark, slot};
use vhost::vhost_user::message::{
    VhostUserMMap, VhostUserMMapFlags, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Backend, Listener, VhostUserFrontendReqHandler};
use vhost_user_backend::{ShutdownHandle, VhostUserBackend, VhostUserDaemon, VringRwLock};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{
    EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier,
};

type Memory = GuestMemoryAtomic<GuestMemoryMmap>;

/// Virtqueues.
pub(crate) const QUEUES: usize = 4;
/// Bytes of the shared memory region.
const REGION: u64 = 1 << 30;
/// The region's number.
const SHMID: u8 = 1;
/// Longest time for QEMU to carry out a test's request.
const LIMIT: Duration = Duration::from_secs(30);

/// Acts of the front end.
#[derive(Default)]
struct Seen {
    channel: Mutex<Option<Backend>>,
    connected: Condvar,
    connection: Mutex<Option<ShutdownHandle>>,
    tables: AtomicUsize,
    resets: AtomicUsize,
}

/// A backend, listening. Any number of front ends, one after the other.
pub(crate) struct Probe {
    seen: Arc<Seen>,
    slots: Arc<File>,
}

impl Probe {
    /// Listens at a socket.
    pub(crate) fn listen(socket: &Path) -> Probe {
        let seen = Arc::<Seen>::default();
        let mut listener = Listener::new(socket, true).unwrap();
        let serving = Arc::clone(&seen);
        thread::spawn(move || {
            loop {
                let backend = Arc::new(Served(Arc::clone(&serving)));
                let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
                let daemon = VhostUserDaemon::new("probe".into(), backend, memory);
                let Ok(mut daemon) = daemon else { return };
                if daemon.start(&mut listener).is_err() {
                    return;
                }
                *lock(&serving.connection) = daemon.shutdown_handle();
                let _ = daemon.wait();
                *lock(&serving.channel) = None;
            }
        });
        const SLOTS: u64 = 512;
        let slots = File::from(sealed_memfd("slots", SLOTS * SLOT).unwrap());
        for n in 0..SLOTS {
            slots.write_all_at(&mark(n).to_le_bytes(), n * SLOT).unwrap();
        }
        Probe { seen, slots: Arc::new(slots) }
    }

    /// How often the front end has sent its memory table.
    pub(crate) fn tables(&self) -> usize {
        self.seen.tables.load(Ordering::SeqCst)
    }

    /// How often the front end has told of a reset.
    pub(crate) fn resets(&self) -> usize {
        self.seen.resets.load(Ordering::SeqCst)
    }

    /// Ends the connection.
    pub(crate) fn hang_up(&self) {
        lock(&self.seen.connection).take().expect("no front end").shutdown();
    }

    /// Does something with the channel to QEMU, in time.
    #[track_caller]
    fn ask<T: Send + 'static>(&self, job: impl FnOnce(Asked) -> T + Send + 'static) -> T {
        let channel = lock(&self.seen.channel);
        let (channel, _) = (self.seen.connected)
            .wait_timeout_while(channel, LIMIT, |channel| channel.is_none())
            .unwrap();
        let backend = channel.clone().expect("no front end");
        drop(channel);
        let asked = Asked { backend, slots: Arc::clone(&self.slots) };
        let (done, answer) = std::sync::mpsc::channel();
        thread::spawn(move || done.send(job(asked)));
        answer.recv_timeout(LIMIT).expect("QEMU does not answer")
    }

    /// Maps the first slots; how long each took from the request to its reply.
    #[track_caller]
    pub(crate) fn map(&self, n: u64) -> io::Result<Vec<Duration>> {
        self.ask(move |asked| (0..n).map(|n| asked.map(n)).collect())
    }

    /// Unmaps a slot.
    #[track_caller]
    pub(crate) fn unmap(&self, n: u64) -> io::Result<u64> {
        self.ask(move |asked| asked.backend.shmem_unmap(&request(slot(n), 0, SLOT)))
    }

    /// Maps a page at the start of the region, and returns the page's file.
    #[track_caller]
    pub(crate) fn map_words(&self) -> Arc<File> {
        let words = Arc::new(File::from(sealed_memfd("words", 4096).unwrap()));
        let file = Arc::clone(&words);
        self.ask(move |asked| asked.backend.shmem_map(&request(0, 0, 4096), &*file)).unwrap();
        words
    }

    /// Maps slot after slot and has the guest look at each as soon as the reply is there, while
    /// QEMU is kept busy with another request.
    #[track_caller]
    pub(crate) fn race(&self, last: u64, words: &Arc<File>) {
        let words = Arc::clone(words);
        self.ask(move |asked| {
            for n in 1..=last {
                asked.map(n).unwrap();
                words.write_all_at(&n.to_le_bytes(), 0).unwrap();
                asked.map(last + n).unwrap();
                let start = Instant::now();
                let mut seen = [0; 8];
                while u64::from_le_bytes(seen) != n {
                    assert!(start.elapsed() < LIMIT, "the guest does not look");
                    thread::sleep(Duration::from_micros(20));
                    words.read_exact_at(&mut seen, 8).unwrap();
                }
            }
        });
    }

    /// Maps and unmaps slot 0 until `stop`, whatever the answers are; how many were refused.
    pub(crate) fn flicker_while<T>(&self, during: impl FnOnce() -> T) -> (T, u64) {
        let (stop, stopped) = channel::<()>();
        let backend = lock(&self.seen.channel).clone().expect("no front end");
        let asked = Asked { backend, slots: Arc::clone(&self.slots) };
        let flicker = thread::spawn(move || {
            let mut refused = 0;
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                refused += u64::from(asked.map(0).is_err());
                let _ = asked.backend.shmem_unmap(&request(slot(0), 0, SLOT));
            }
            refused
        });
        let result = during();
        drop(stop);
        (result, flicker.join().unwrap())
    }
}

/// The resources of a job on the channel to QEMU.
struct Asked {
    backend: Backend,
    slots: Arc<File>,
}

impl Asked {
    fn map(&self, n: u64) -> io::Result<Duration> {
        let start = Instant::now();
        self.backend.shmem_map(&request(slot(n), n * SLOT, SLOT), &*self.slots)?;
        Ok(start.elapsed())
    }
}

fn request(shm_offset: u64, fd_offset: u64, len: u64) -> VhostUserMMap {
    let flags = VhostUserMMapFlags::WRITABLE.bits();
    VhostUserMMap { shmid: SHMID, padding: [0; 7], fd_offset, shm_offset, len, flags }
}

struct Served(Arc<Seen>);

impl VhostUserBackend for Served {
    type Bitmap = ();
    type Vring = VringRwLock;

    fn num_queues(&self) -> usize {
        QUEUES
    }

    fn max_queue_size(&self) -> usize {
        256
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::SHMEM
            | VhostUserProtocolFeatures::RESET_DEVICE
    }

    fn reset_device(&self) {
        self.0.resets.fetch_add(1, Ordering::SeqCst);
    }

    fn set_event_idx(&self, _enabled: bool) {}

    fn get_config(&self, _offset: u32, size: u32) -> Vec<u8> {
        vec![0; size as usize]
    }

    fn update_memory(&self, _memory: Memory) -> io::Result<()> {
        self.0.tables.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        *lock(&self.0.channel) = Some(backend);
        self.0.connected.notify_all();
    }

    fn get_shmem_config(&self) -> io::Result<VhostUserShMemConfig> {
        // Sizes are by number: there is no region 0.
        Ok(VhostUserShMemConfig::new(1, &[0, REGION]))
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    fn handle_event(
        &self,
        _event: u16,
        _set: EventSet,
        _vrings: &[VringRwLock],
        _thread: usize,
    ) -> io::Result<()> {
        Ok(())
    }
}
