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

/// QEMU's figures of a finished migration.
#[derive(Clone, Copy, Debug)]
pub struct Moved {
    /// From its beginning to its end.
    pub total: Duration,
    /// Without a running processor.
    pub downtime: Duration,
    /// Bytes of the guest's state.
    pub bytes: u64,
}

/// A way for QEMU to migrate a guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// Capabilities of QEMU: `auto-converge`, `multifd`.
    pub capabilities: &'static [&'static str],
    /// The guest is paused meanwhile.
    pub paused: bool,
}

impl Way {
    /// The known capabilities. A QEMU keeps them for the next migration of its guest.
    const CAPABILITIES: [&'static str; 2] = ["auto-converge", "multifd"];

    fn arguments(self) -> Value {
        let all = Self::CAPABILITIES.map(|name| {
            let state = self.capabilities.contains(&name);
            json!({ "capability": name, "state": state })
        });
        json!({ "capabilities": all })
    }
}

impl Guest {
    /// Takes out the `n`th ISM device of an [`unpluggable`](super::Vm::unpluggable) guest, and waits
    /// for the guest to release the device. Removes the chardev, too, to free the daemon's socket.
    #[track_caller]
    pub fn unplug(&self, n: usize) {
        self.qmp_with("device_del", &json!({ "id": format!("plug{n}") }));
        self.wait_unplugged(n);
    }

    /// The second half of [`Guest::unplug`], after `device_del`.
    #[track_caller]
    pub fn wait_unplugged(&self, n: usize) {
        // Skips the event of the nameless device behind the PCI function.
        while self.qmp_event("DEVICE_DELETED", LIMIT)["device"] != format!("plug{n}") {}
        self.qmp_with("chardev-remove", &json!({ "id": format!("plug-socket{n}") }));
    }

    /// The socket of the guest's `n`th ISM device at the daemon of the present host.
    pub fn socket(&self, n: usize) -> PathBuf {
        self.host.sockets(&self.vm).swap_remove(n)
    }

    /// Plugs the `n`th ISM device in, at the daemon of the present host.
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

    /// Migrates the running guest to a QEMU of a host, and ends the old QEMU.
    #[track_caller]
    pub fn migrate(&mut self, to: &Bed) -> Moved {
        self.migrate_as(to, Way::default(), || {})
    }

    /// Like [`Guest::migrate`], in a way of QEMU's, with a call of `then` once the new QEMU waits for the
    /// guest.
    #[track_caller]
    pub fn migrate_as(&mut self, to: &Bed, way: Way, then: impl FnOnce()) -> Moved {
        to.host.add_ports(&self.vm);
        let mut there = to.host.start_incoming(&self.vm);
        let set = "migrate-set-capabilities";
        let answer = there.qmp.command(set, &way.arguments());
        answer.unwrap_or_else(|error| panic!("{}: {set}: {error}", self.vm.name));
        self.qmp_with(set, &way.arguments());
        let uri = to.host.migration(&self.vm.name);
        self.receive(&mut there, &uri);
        then();
        self.will_move();
        if way.paused {
            self.pause();
        }
        self.qmp_with("migrate", &json!({ "uri": uri }));
        let moved = self.sent();
        self.wait_until(&mut there.qmp, if way.paused { "paused" } else { "running" });
        self.go_on(to, there);
        if way.paused {
            self.resume();
        }
        moved
    }

    /// Tries to migrate to a host with a refusing QEMU; the guest goes on here.
    #[track_caller]
    pub fn migrate_in_vain(&self, to: &Bed) {
        to.host.add_ports(&self.vm);
        let mut there = to.host.start_incoming(&self.vm);
        let uri = to.host.migration(&self.vm.name);
        self.receive(&mut there, &uri);
        // Without a return path the sender would finish before any news of the refusal.
        let answers = json!({ "capability": "return-path", "state": true });
        self.qmp_with("migrate-set-capabilities", &json!({ "capabilities": [answers] }));
        self.qmp_with("migrate", &json!({ "uri": uri }));
        let mut qmp = self.machine.qmp.lock().unwrap_or_else(PoisonError::into_inner);
        self.poll(&mut qmp, "query-migrate", |now| now["status"] == "failed");
    }

    /// Writes the guest's state to a file by `saving`, which pauses the guest first, and ends the
    /// QEMU.
    #[track_caller]
    pub fn save(&mut self, saving: impl FnOnce(&Guest)) -> Moved {
        self.will_move();
        saving(self);
        let moved = self.sent();
        self.kill();
        moved
    }

    /// Restores the guest from a file in a new QEMU of a host.
    #[track_caller]
    pub fn restore(&mut self, on: &Bed, file: &Path) {
        on.host.add_ports(&self.vm);
        let mut there = on.host.start_incoming(&self.vm);
        self.receive(&mut there, &format!("file:{}", file.display()));
        // The guest was paused for saving.
        self.wait_until(&mut there.qmp, "paused");
        self.go_on(on, there);
        self.resume();
    }

    /// Ends the present QEMU, and restores the guest's earlier state from the file.
    #[track_caller]
    pub fn restore_again(&mut self, on: &Bed, file: &Path) {
        self.will_move();
        self.kill();
        self.restore(on, file);
    }

    /// A last command flushes the channel: every earlier line has arrived, and no later one will come.
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

    /// Waits for a status of the receiving QEMU.
    #[track_caller]
    fn wait_until(&self, qmp: &mut Qmp, wanted: &str) {
        self.poll(qmp, "query-status", |now| now["status"] == wanted);
    }

    /// Asks QEMU again and again until `done` accepts the answer; returns this answer.
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

    /// Moves the guest over to the other QEMU.
    fn go_on(&mut self, on: &Bed, there: Incoming) {
        let now = self.machine.moved(there);
        let before = std::mem::replace(&mut self.machine, now);
        // The old QEMU's end of the control channel is read before the new one's.
        before.program.kill();
        self.host = Arc::clone(&on.host);
    }
}
