// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest goes on in another QEMU: live migration, and a snapshot in a file.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::bed::Bed;
use super::guest::Guest;
use super::machine::Incoming;
use super::qmp::Qmp;

/// How long QEMU may take to move a guest's state, and a guest to let go of a device.
const LIMIT: Duration = Duration::from_secs(120);
/// Between two looks at how far QEMU is.
const LOOK: Duration = Duration::from_millis(10);

/// What QEMU says of a migration that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// From its beginning to its end.
    pub total: Duration,
    /// Without a running processor.
    pub downtime: Duration,
    /// Bytes of the guest's state.
    pub bytes: u64,
}

impl Guest {
    /// Takes out the `n`th ISM device of a guest that is [`Vm::unpluggable`](super::Vm::unpluggable),
    /// and waits until the guest has let go of it. Its chardev goes, too, so that the daemon's socket
    /// is free.
    #[track_caller]
    pub fn unplug(&self, n: usize) {
        self.qmp_with("device_del", &json!({ "id": format!("plug{n}") }));
        self.wait_unplugged(n);
    }

    /// As [`Guest::unplug`] after `device_del`.
    #[track_caller]
    pub fn wait_unplugged(&self, n: usize) {
        // Another event is for the device behind the PCI function, which has no name.
        while self.qmp_event("DEVICE_DELETED", LIMIT)["device"] != format!("plug{n}") {}
        self.qmp_with("chardev-remove", &json!({ "id": format!("plug-socket{n}") }));
    }

    /// Where the daemon of the host where it runs listens for its `n`th ISM device.
    pub fn socket(&self, n: usize) -> PathBuf {
        self.host.sockets(&self.vm).swap_remove(n)
    }

    /// Plugs its `n`th ISM device in, at the daemon of the host where it runs.
    #[track_caller]
    pub fn plug(&self, n: usize) {
        let socket = self.socket(n);
        let (chardev, bus) = (format!("plug-socket{n}"), format!("plug-port{n}"));
        let address = json!({ "type": "unix", "data": { "path": socket } });
        let data = json!({ "addr": address, "server": false, "reconnect-ms": 200 });
        let backend = json!({ "type": "socket", "data": data });
        self.qmp_with("chardev-add", &json!({ "id": chardev, "backend": backend }));
        let device = json!({ "driver": "vhost-user-ism-pci", "id": format!("plug{n}"), "bus": bus,
                             "chardev": chardev, "romfile": "" });
        self.qmp_with("device_add", &device);
    }

    /// Migrates it while it runs to a QEMU of a host, and ends the one that had it.
    #[track_caller]
    pub fn migrate(&mut self, to: &Bed) -> Moved {
        self.migrate_as(to, || {})
    }

    /// As [`Guest::migrate`], when the QEMU that gets it waits for it, and `then` was done.
    #[track_caller]
    pub fn migrate_as(&mut self, to: &Bed, then: impl FnOnce()) -> Moved {
        to.host.add_ports(&self.vm);
        let mut there = to.host.start_incoming(&self.vm);
        let uri = to.host.migration(&self.vm.name);
        self.receive(&mut there, &uri);
        then();
        self.will_move();
        self.qmp_with("migrate", &json!({ "uri": uri }));
        let moved = self.sent();
        self.wait_until(&mut there.qmp, "running");
        self.go_on(to, there);
        moved
    }

    /// Is not migrated to a host whose QEMU refuses it, and goes on.
    #[track_caller]
    pub fn migrate_in_vain(&self, to: &Bed) {
        to.host.add_ports(&self.vm);
        let mut there = to.host.start_incoming(&self.vm);
        let uri = to.host.migration(&self.vm.name);
        self.receive(&mut there, &uri);
        // Without it the one who sends is done before it can hear of the refusal.
        let answers = json!({ "capability": "return-path", "state": true });
        self.qmp_with("migrate-set-capabilities", &json!({ "capabilities": [answers] }));
        self.qmp_with("migrate", &json!({ "uri": uri }));
        let mut qmp = self.machine.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        self.poll(&mut qmp, "query-migrate", |now| now["status"] == "failed");
    }

    /// Has its state written to a file by `saving`, which pauses it first, and ends its QEMU.
    #[track_caller]
    pub fn save(&mut self, saving: impl FnOnce(&Guest)) -> Moved {
        self.will_move();
        saving(self);
        let moved = self.sent();
        self.kill();
        moved
    }

    /// Lets it go on from a file in a new QEMU of a host.
    #[track_caller]
    pub fn restore(&mut self, on: &Bed, file: &Path) {
        on.host.add_ports(&self.vm);
        let mut there = on.host.start_incoming(&self.vm);
        self.receive(&mut there, &format!("file:{}", file.display()));
        // It was paused when it was saved.
        self.wait_until(&mut there.qmp, "paused");
        self.go_on(on, there);
        self.resume();
    }

    /// Ends its QEMU, and lets the guest that was in the file before go on.
    #[track_caller]
    pub fn restore_again(&mut self, on: &Bed, file: &Path) {
        self.will_move();
        self.kill();
        self.restore(on, file);
    }

    /// All that it was told has arrived, and nothing else will.
    #[track_caller]
    fn will_move(&self) {
        self.ok("true");
        self.machine.channel.will_move();
    }

    #[track_caller]
    fn receive(&self, there: &mut Incoming, uri: &str) {
        let answer = there.qmp.command("migrate-incoming", &json!({ "uri": uri }));
        answer.unwrap_or_else(|error| panic!("{}: migrate-incoming {uri}: {error}", self.vm.name));
    }

    /// Waits until its state has been sent.
    #[track_caller]
    fn sent(&self) -> Moved {
        let mut qmp = self.machine.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = self.poll(&mut qmp, "query-migrate", |now| match now["status"].as_str() {
            Some("failed" | "cancelled") => panic!("{} is not migrated: {now}", self.vm.name),
            status => status == Some("completed"),
        });
        let millis = |name: &str| Duration::from_millis(ended[name].as_u64().unwrap_or_default());
        let (total, downtime) = (millis("total-time"), millis("downtime"));
        let bytes = ended["ram"]["transferred"].as_u64().unwrap_or_default();
        Moved { total, downtime, bytes }
    }

    /// Waits until the QEMU that gets it says so of it.
    #[track_caller]
    fn wait_until(&self, qmp: &mut Qmp, wanted: &str) {
        self.poll(qmp, "query-status", |now| now["status"] == wanted);
    }

    /// Asks QEMU again and again until the answer is the one: that answer.
    #[track_caller]
    fn poll(&self, qmp: &mut Qmp, command: &str, done: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + LIMIT;
        loop {
            let now = qmp.command(command, &json!({}));
            let now = now.unwrap_or_else(|error| panic!("{}: {command}: {error}", self.vm.name));
            if done(&now) {
                return now;
            }
            let in_time = Instant::now() < end;
            assert!(in_time, "{}: {command} within {LIMIT:?}: {now}", self.vm.name);
            thread::sleep(LOOK);
        }
    }

    /// It is in another QEMU now.
    fn go_on(&mut self, on: &Bed, there: Incoming) {
        let now = self.machine.moved(there);
        let before = std::mem::replace(&mut self.machine, now);
        // Its end of the control channel is read before that of the other one.
        before.program.kill();
        self.host = Arc::clone(&on.host);
    }
}
