// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The devices and connections that fit at present.

use std::time::Duration;

use ism_sys::connect_unix;
use rustix::process::{Resource, getrlimit};
use vhost_device_ism::management::{Client, Guest};

use super::finding::{Finding, Status};
use crate::paths;

/// How long the daemon may take to accept.
const PATIENCE: Duration = Duration::from_secs(2);
/// Shared memory of a connection and of an idle pair of processes, by docs/operating.md, "Capacity".
const PER_CONNECTION: u64 = 248 << 10;
const PER_PAIR: u64 = 8 << 20;
/// The usual limit of mapped areas, which no number of connections has reached.
const AREAS: u64 = 65_530;
/// Descriptors of a program itself.
const OWN: u64 = 64;

/// The findings: devices by the daemon, connections by this machine's limits.
pub(super) fn all() -> Vec<Finding> {
    let number = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse().ok();
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let connections = connections(
        getrlimit(Resource::Nofile).current,
        available(&memory),
        number("/proc/sys/vm/max_map_count"),
    );
    devices(&guests()).into_iter().chain([connections]).collect()
}

/// The devices of the daemon, if this user may ask.
fn guests() -> Vec<Guest> {
    let ask = || {
        let stream = connect_unix(&paths::management().ok()?, PATIENCE).ok()?;
        Client::over(stream.into()).ok()?.list().ok()
    };
    ask().unwrap_or_default()
}

/// Free devices of each pool.
fn devices(guests: &[Guest]) -> Option<Finding> {
    let pools: Vec<(&Guest, u32)> = guests
        .iter()
        .filter_map(|guest| Some((guest, guest.devices?.saturating_sub(guest.devices_in_use?))))
        .collect();
    let says = pools.iter().map(|(pool, free)| {
        format!("{free} of {} free in the pool {}", pool.devices.unwrap_or_default(), pool.name)
    });
    let says = says.collect::<Vec<_>>().join(", ");
    let is_full = pools.iter().any(|(_, free)| *free == 0);
    let status = if is_full { Status::No } else { Status::Ok };
    (!pools.is_empty())
        .then(|| Finding::new("devices", status, format!("{says}; one for each process")))
}

/// The connections that fit: of a process by its descriptors, of the machine by its memory.
fn connections(descriptors: Option<u64>, memory: Option<u64>, areas: Option<u64>) -> Finding {
    const NAME: &str = "capacity";
    let mut says = vec![match descriptors {
        // The library's own descriptors have numbers beyond the limit.
        Some(limit) => {
            format!("{} connections of a process, by its descriptors", limit.saturating_sub(OWN))
        }
        None => "connections of a process without a limit of descriptors".to_owned(),
    }];
    let mut is_low = false;
    if let Some(memory) = memory {
        let fit = memory.saturating_sub(PER_PAIR) / PER_CONNECTION;
        is_low |= fit == 0;
        says.push(format!("about {fit} of a pair in {} MiB of free memory", memory >> 20));
    }
    if let Some(areas) = areas.filter(|areas| *areas < AREAS) {
        is_low = true;
        says.push(format!("vm.max_map_count is {areas}, below the usual {AREAS}"));
    }
    Finding::new(NAME, if is_low { Status::No } else { Status::Ok }, says.join("; "))
}

/// Bytes that new memory may take, by /proc/meminfo.
fn available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_told_by_the_limit_that_ends_it() {
        let says = |finding: Finding| (finding.status, finding.says);
        let memory = available("MemTotal: 9 kB\nMemAvailable:    262144 kB\n");
        assert_eq!(memory, Some(256 << 20));
        let (status, words) = says(connections(Some(1024), memory, Some(AREAS)));
        assert_eq!(status, Status::Ok);
        assert_eq!(
            words,
            "960 connections of a process, by its descriptors; about 1024 of a pair in 256 MiB of free memory"
        );
        let (status, words) = says(connections(None, Some(1 << 20), Some(1000)));
        assert_eq!(status, Status::No);
        assert!(
            words.contains("about 0 of a pair") && words.contains("vm.max_map_count is 1000"),
            "{words}"
        );
        assert_eq!(available("MemTotal: 9 kB"), None);
    }

    #[test]
    fn a_pool_without_a_free_device_is_no_pass() {
        let pool = |in_use: u32| {
            let text = serde_json::json!({"name": "any", "chid": "ff00", "devices": 2, "devices_in_use": in_use});
            serde_json::from_value::<Guest>(text)
        };
        let Ok((some, none)) = pool(1).and_then(|some| Ok((some, pool(2)?))) else { panic!() };
        let said = devices(&[some]).map(|finding| (finding.status, finding.says));
        let free = "1 of 2 free in the pool any; one for each process".to_owned();
        assert_eq!(said, Some((Status::Ok, free)));
        assert_eq!(devices(&[none]).map(|finding| finding.status), Some(Status::No));
        assert!(devices(&[]).is_none());
    }
}
