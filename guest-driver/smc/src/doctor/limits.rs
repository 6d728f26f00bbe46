// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limits of this process relevant to SMC.

use rustix::process::{Resource, getrlimit};

use super::finding::{Finding, Status};

/// A process with a lower limit gets no device.
pub(crate) const FEW_DESCRIPTORS: u64 = 256;
/// Memory pinned by a stack in a virtual machine or with RDMA, bytes.
const PINNED: u64 = 64 << 20;

/// The findings about each limit.
pub(super) fn all() -> Vec<Finding> {
    let limit = |which| getrlimit(which).current;
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
    vec![
        descriptors(limit(Resource::Nofile)),
        pinned(limit(Resource::Memlock)),
        spinning(processors),
    ]
}

fn descriptors(limit: Option<u64>) -> Finding {
    const NAME: &str = "descriptors";
    match limit {
        None => Finding::new(NAME, Status::Ok, "unlimited"),
        Some(limit) if limit >= FEW_DESCRIPTORS => {
            Finding::new(NAME, Status::Ok, format!("{limit} for each process"))
        }
        Some(limit) => {
            let says = format!("{limit} for each process, which leaves no room for a device");
            Finding::new(NAME, Status::No, says).grant("ulimit -n 1024")
        }
    }
}

fn pinned(limit: Option<u64>) -> Finding {
    const NAME: &str = "pinned-memory";
    match limit {
        None => Finding::new(NAME, Status::Ok, "unlimited"),
        Some(limit) if limit >= PINNED => {
            Finding::new(NAME, Status::Ok, format!("{} MiB for each process", limit >> 20))
        }
        Some(limit) => {
            let says =
                format!("{} KiB for each process; RDMA wants {} MiB", limit >> 10, PINNED >> 20);
            Finding::new(NAME, Status::No, says).grant("ulimit -l unlimited")
        }
    }
}

fn spinning(processors: usize) -> Finding {
    const NAME: &str = "processors";
    match processors {
        1 => {
            Finding::new(NAME, Status::No, "one: waiting calls have to sleep, which costs latency")
        }
        n => Finding::new(NAME, Status::Ok, format!("{n}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_limits_come_with_the_command_that_raises_them() {
        assert_eq!(descriptors(Some(255)).grant.as_deref(), Some("ulimit -n 1024"));
        assert_eq!(pinned(Some(8 << 20)).grant.as_deref(), Some("ulimit -l unlimited"));
        for fine in [descriptors(None), descriptors(Some(1024)), pinned(None)] {
            assert_eq!(fine.status, Status::Ok);
        }
    }
}
