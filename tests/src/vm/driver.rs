// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters of the kernel's driver, and mistakes reported by its kernel.

/// Texts of a kernel's reports of mistakes.
///
/// Not the warning about missing PCI devices in each boot of user-mode Linux: its PCI bus serves the
/// dependencies of SMC.
const SPLATS: [&str; 14] = [
    "BUG:",
    "WARNING:",
    "Oops",
    "KASAN",
    "UBSAN",
    "ODEBUG: ",
    "Kernel panic",
    "possible circular locking",
    "inconsistent lock state",
    "possible recursive locking",
    "suspicious RCU",
    "INFO: task",
    "Segfault with no mm",
    "unreferenced object",
];
/// Lines shown of a mistake.
const SHOWN: usize = 60;

/// A file with the driver's counters.
pub(super) const COUNTERS: &str = "/sys/kernel/debug/virtio_ism/*/counters";

/// A counter in the text of [`COUNTERS`].
#[track_caller]
pub(super) fn counter(counters: &str, name: &str) -> u64 {
    let line = counters.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    let value = line.and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no counter {name}: {counters}"))
}

/// Checks a kernel's lines: none names a mistake, except lines with a text of `known`.
#[track_caller]
pub(super) fn assert_no_splats(name: &str, said: &str, known: &[&str]) {
    let lines: Vec<&str> = said.lines().collect();
    let is_splat = |line: &str| {
        SPLATS.iter().any(|splat| line.contains(splat))
            && !known.iter().any(|known| line.contains(known))
    };
    if let Some(at) = lines.iter().position(|line| is_splat(line)) {
        let end = lines.len().min(at + SHOWN);
        panic!("{name}: its kernel says:\n{}", lines[at..end].join("\n"));
    }
}
