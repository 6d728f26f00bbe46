// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters in Prometheus' text format (OpenMetrics).

use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::vhost::FAULTS;
use crate::vhost::device_slot::GuestStatus;
use ism_device::{Counts, DeviceInfo};
use virtio_ism_abi::Status;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct GuestLabels {
    guest: String,
    chid: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabels {
    guest: String,
    chid: String,
    reason: &'static str,
}

type Value = fn(&DeviceInfo) -> u64;

const GAUGES: &[(&str, &str, Value)] = &[
    ("dmbs", "DMBs registered", |d| d.dmbs),
    ("dmb_bytes", "Bytes of DMBs registered", |d| d.dmb_bytes),
    ("attached", "DMBs of peers attached", |d| d.attached),
    ("slabs", "Slabs mapped into the front end", |d| d.slabs),
    ("slab_bytes", "Bytes of slabs owned", |d| d.slab_bytes),
    ("attached_slab_bytes", "Bytes of peers' slabs mapped", |d| d.attached_slab_bytes),
    ("map_slots", "Mapping slots in use or reserved", |d| d.map_slots),
    ("peers", "Related peers", |d| d.peers),
    ("leaving", "Devices whose drivers were asked to leave", |d| d.is_leaving.into()),
    ("window_bytes", "Size of the window; 0 if the front end cannot map", |d| d.window_size),
];

/// A guest with the devices of its front ends.
struct Devices<'a> {
    guest: &'a GuestStatus,
    now: Vec<&'a DeviceInfo>,
    /// Counters of ended devices.
    ended: Vec<&'a DeviceInfo>,
}

impl Devices<'_> {
    /// Sum of a value over the present devices.
    fn sum(&self, value: Value) -> u64 {
        self.now.iter().fold(0, |sum, device| sum.saturating_add(value(device)))
    }

    /// Sum of the counters of all devices, including ended ones.
    fn counted(&self) -> DeviceInfo {
        let mut sum = DeviceInfo::default();
        self.now.iter().chain(&self.ended).for_each(|device| sum.add_counters(device));
        sum
    }
}

/// Groups the front ends of a pool under the pool's name: their own names would be unbounded in number.
fn by_guest(statuses: &[GuestStatus]) -> Vec<Devices<'_>> {
    let mut guests: Vec<Devices<'_>> = Vec::new();
    for status in statuses {
        // The front ends of a pool follow the pool.
        match guests.last_mut().filter(|_| status.member.is_some()) {
            Some(pool) => {
                pool.now.extend(&status.device);
                pool.ended.push(&status.ended);
            }
            None => guests.push(Devices {
                guest: status,
                now: status.device.iter().collect(),
                ended: vec![&status.ended],
            }),
        }
    }
    guests
}

/// Renders the metrics of all guests. Counters continue when front ends come and go. `is_broker_up`: whether
/// the broker runs; `None`: the daemon needs none. `uptime`: time since the daemon's start.
pub(crate) fn render(
    statuses: &[GuestStatus],
    is_broker_up: Option<bool>,
    uptime: Duration,
) -> String {
    let guests = &by_guest(statuses);
    let mut registry = Registry::with_prefix("ism");
    let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
    registry.register("build", "Version of the daemon", version);
    let running = Gauge::<i64>::default();
    running.set(i64::try_from(uptime.as_secs()).unwrap_or(i64::MAX));
    registry.register("uptime_seconds", "How long the daemon has run", running);
    if let Some(is_up) = is_broker_up {
        let gauge = Gauge::<i64>::default();
        gauge.set(is_up.into());
        let help = "Whether the process that makes sockets, for pools and added guests, is there";
        registry.register("broker_up", help, gauge);
    }
    let label = |devices: &Devices<'_>| GuestLabels {
        guest: devices.guest.spec.name.clone(),
        chid: devices.guest.spec.chid.to_string(),
    };
    let gauge = |registry: &mut Registry, name, help, value: &dyn Fn(&Devices<'_>) -> u64| {
        let family = Family::<GuestLabels, Gauge>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            let value = i64::try_from(value(guest)).unwrap_or(i64::MAX);
            family.get_or_create(&label(guest)).set(value);
        }
    };
    gauge(&mut registry, "connected", "Front ends that are connected", &|devices| {
        devices.now.len() as u64
    });
    gauge(&mut registry, "devices", "Devices that front ends can have", &|devices| {
        u64::from(devices.guest.spec.devices.unwrap_or(1))
    });
    gauge(&mut registry, "hanging_threads", "Threads that past front ends hold", &|devices| {
        devices.guest.hanging as u64
    });
    let touched = "Bytes of guest memory that the daemon allocated by touching them first";
    gauge(&mut registry, "touched_bytes", touched, &|devices| devices.guest.touched_bytes);
    for (name, help, value) in GAUGES {
        gauge(&mut registry, name, help, &|devices| devices.sum(*value));
    }
    let counter = |registry: &mut Registry, name, help, value: &dyn Fn(&Devices<'_>) -> u64| {
        let family = Family::<GuestLabels, Counter>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            family.get_or_create(&label(guest)).inc_by(value(guest));
        }
    };
    counter(&mut registry, "connections", "Connections of front ends", &|devices| {
        devices.guest.connections
    });
    let refused = "Connections to a pool that got no device";
    counter(&mut registry, "refused_connections", refused, &|devices| {
        devices.guest.pool.as_ref().map_or(0, |pool| pool.refused)
    });
    for row in Counts::ALL {
        counter(&mut registry, row.metric, row.help, &|devices| {
            (row.get)(&devices.counted().counts)
        });
    }

    let reasons = |registry: &mut Registry, name, help, list: &dyn Fn(&Devices<'_>) -> Reasons| {
        let family = Family::<ReasonLabels, Counter>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            for (reason, count) in list(guest).into_iter().filter(|(_, count)| *count != 0) {
                let GuestLabels { guest, chid } = label(guest);
                family.get_or_create(&ReasonLabels { guest, chid, reason }).inc_by(count);
            }
        }
    };
    reasons(&mut registry, "commands_refused", "Control commands refused", &|devices| {
        by_status(devices.counted().refusals)
    });
    reasons(&mut registry, "moves_refused", "Moves refused", &|devices| {
        by_status(devices.counted().move_refusals)
    });
    reasons(&mut registry, "faults", "Rules broken by front end or driver", &|devices| {
        FAULTS.iter().map(|fault| fault.name()).zip(devices.guest.faults).collect()
    });

    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

type Reasons = Vec<(&'static str, u64)>;

fn by_status(counts: [u64; Status::ALL.len()]) -> Reasons {
    Status::ALL.iter().map(|status| status.name()).zip(counts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GuestSpec;
    use crate::vhost::device_slot::{MemberInfo, PoolInfo};
    use ism_device::Counter;

    fn moves(moves: u64) -> Counts {
        Counts { moves, ..Counts::default() }
    }

    #[test]
    fn every_counter_has_a_line_per_guest() {
        let mut device = DeviceInfo { counts: moves(7), ..DeviceInfo::default() };
        device.refusals[usize::from(Status::Enoent.code())] = 3;
        let guest = GuestStatus {
            spec: GuestSpec::new("/run/vm1.sock"),
            device: Some(device),
            ended: DeviceInfo { counts: moves(3), peers: 9, ..DeviceInfo::default() },
            connections: 2,
            hanging: 0,
            touched_bytes: 0,
            faults: [1; FAULTS.len()],
            pool: None,
            member: None,
        };
        let text = render(&[guest], Some(false), Duration::from_secs(77));
        for line in [
            "ism_moves_total{guest=\"vm1\",chid=\"ff00\"} 10",
            "ism_peers{guest=\"vm1\",chid=\"ff00\"} 0",
            "ism_connected{guest=\"vm1\",chid=\"ff00\"} 1",
            "ism_connections_total{guest=\"vm1\",chid=\"ff00\"} 2",
            "ism_commands_refused_total{guest=\"vm1\",chid=\"ff00\",reason=\"enoent\"} 3",
            "ism_faults_total{guest=\"vm1\",chid=\"ff00\",reason=\"bad_chain\"} 1",
            "ism_broker_up 0",
            "ism_uptime_seconds 77",
            concat!("ism_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        for Counter { metric, .. } in Counts::ALL {
            let line = format!("ism_{metric}_total{{guest=\"vm1\",chid=\"ff00\"}} ");
            assert!(text.contains(&line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("einval"), "zero counts of reasons are left out");
    }

    #[test]
    fn a_pool_counts_for_the_front_ends_that_it_has_and_had() {
        let with_moves = |n| DeviceInfo { counts: moves(n), peers: 1, ..DeviceInfo::default() };
        let spec = GuestSpec { devices: Some(8), ..GuestSpec::new("/run/any.sock") };
        let status = |name: &str, device| GuestStatus {
            spec: GuestSpec { name: name.into(), ..spec.clone() },
            device,
            ended: DeviceInfo::default(),
            connections: 3,
            hanging: 0,
            touched_bytes: 0,
            faults: [0; FAULTS.len()],
            pool: None,
            member: None,
        };
        let pool = Some(PoolInfo { in_use: 2, refused: 5, drained: false });
        let member = MemberInfo { pool: "any".into(), pid: 1, uid: Some(0), network_namespace: 4 };
        let front_end = |name| GuestStatus {
            member: Some(member.clone()),
            ..status(name, Some(with_moves(7)))
        };
        let pool = GuestStatus { pool, ended: with_moves(100), ..status("any", None) };
        let text = render(
            &[pool, front_end("any/2"), front_end("any/3"), status("b", None)],
            None,
            Duration::ZERO,
        );
        for line in [
            "ism_moves_total{guest=\"any\",chid=\"ff00\"} 114",
            "ism_peers{guest=\"any\",chid=\"ff00\"} 2",
            "ism_connected{guest=\"any\",chid=\"ff00\"} 2",
            "ism_devices{guest=\"any\",chid=\"ff00\"} 8",
            "ism_refused_connections_total{guest=\"any\",chid=\"ff00\"} 5",
            "ism_connected{guest=\"b\",chid=\"ff00\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("any/2") && !text.contains("broker"), "{text}");
    }
}
