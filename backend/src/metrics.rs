//! Counters in Prometheus' text format (OpenMetrics).

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::device::DeviceInfo;
use crate::vhost::FAULTS;
use crate::vhost::device_socket::GuestStatus;
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
    ("window_bytes", "Size of the window; 0 if the front end cannot map", |d| d.window_size),
];

const COUNTERS: &[(&str, &str, Value)] = &[
    ("commands", "Control commands done", |d| d.commands),
    ("moves", "Moves done", |d| d.moves),
    ("move_bytes", "Payload bytes moved", |d| d.move_bytes),
    ("signals", "Signals asked for", |d| d.signals),
    ("kicks_saved", "Signals that needed no kick", |d| d.kicks_saved),
    ("signals_coalesced", "Signals for which a record was pending", |d| d.coalesced),
    ("wakes", "Wake records posted", |d| d.wakes),
    ("sw_events", "Software events delivered", |d| d.sw_events),
    ("sw_events_lost", "Software events lost", |d| d.sw_events_lost),
];

/// All metrics of all guests. Counters of a device start anew when its front end reconnects.
pub(crate) fn render(guests: &[GuestStatus]) -> String {
    let mut registry = Registry::with_prefix("ism");
    let label = |guest: &GuestStatus| GuestLabels {
        guest: guest.spec.name.clone(),
        chid: guest.spec.chid.to_string(),
    };
    let gauge = |registry: &mut Registry, name, help, value: &dyn Fn(&GuestStatus) -> u64| {
        let family = Family::<GuestLabels, Gauge>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            let value = i64::try_from(value(guest)).unwrap_or(i64::MAX);
            family.get_or_create(&label(guest)).set(value);
        }
    };
    gauge(&mut registry, "connected", "Whether a front end is connected", &|guest| {
        u64::from(guest.device.is_some())
    });
    gauge(&mut registry, "hanging_threads", "Threads that past front ends hold", &|guest| {
        guest.hanging as u64
    });
    let touched = "Bytes of guest memory that the daemon allocated by touching them first";
    gauge(&mut registry, "touched_bytes", touched, &|guest| guest.touched_bytes);
    for (name, help, value) in GAUGES {
        gauge(&mut registry, name, help, &|guest| guest.device.as_ref().map_or(0, value));
    }
    let counter = |registry: &mut Registry, name, help, value: &dyn Fn(&GuestStatus) -> u64| {
        let family = Family::<GuestLabels, Counter>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            family.get_or_create(&label(guest)).inc_by(value(guest));
        }
    };
    counter(&mut registry, "connections", "Connections of the front end", &|p| p.connections);
    for (name, help, value) in COUNTERS {
        counter(&mut registry, name, help, &|guest| guest.device.as_ref().map_or(0, value));
    }

    let reasons = |registry: &mut Registry, name, help, list: &dyn Fn(&GuestStatus) -> Reasons| {
        let family = Family::<ReasonLabels, Counter>::default();
        registry.register(name, help, family.clone());
        for guest in guests {
            for (reason, count) in list(guest).into_iter().filter(|(_, count)| *count != 0) {
                let GuestLabels { guest, chid } = label(guest);
                family.get_or_create(&ReasonLabels { guest, chid, reason }).inc_by(count);
            }
        }
    };
    reasons(&mut registry, "commands_refused", "Control commands refused", &|guest| {
        by_status(guest.device.as_ref().map(|device| &device.refusals))
    });
    reasons(&mut registry, "moves_refused", "Moves refused", &|guest| {
        by_status(guest.device.as_ref().map(|device| &device.move_refusals))
    });
    reasons(&mut registry, "faults", "Rules broken by front end or driver", &|guest| {
        FAULTS.iter().map(|fault| fault.name()).zip(guest.faults).collect()
    });

    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &registry);
    text
}

type Reasons = Vec<(&'static str, u64)>;

fn by_status(counts: Option<&[u64; 12]>) -> Reasons {
    let counts = counts.copied().unwrap_or_default();
    Status::ALL.iter().map(|status| status.name()).zip(counts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GuestSpec;

    #[test]
    fn every_counter_has_a_line_per_guest() {
        let mut device = DeviceInfo { moves: 7, ..DeviceInfo::default() };
        device.refusals[usize::from(Status::Enoent.code())] = 3;
        let guest = GuestStatus {
            spec: GuestSpec::new("/run/vm1.sock"),
            device: Some(device),
            connections: 2,
            hanging: 0,
            touched_bytes: 0,
            faults: [1; FAULTS.len()],
        };
        let text = render(&[guest]);
        for line in [
            "ism_moves_total{guest=\"vm1\",chid=\"ff00\"} 7",
            "ism_connected{guest=\"vm1\",chid=\"ff00\"} 1",
            "ism_connections_total{guest=\"vm1\",chid=\"ff00\"} 2",
            "ism_commands_refused_total{guest=\"vm1\",chid=\"ff00\",reason=\"enoent\"} 3",
            "ism_faults_total{guest=\"vm1\",chid=\"ff00\",reason=\"bad_chain\"} 1",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("einval"), "zero counts of reasons are left out");
    }
}
