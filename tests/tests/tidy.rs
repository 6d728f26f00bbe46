//! The structure that docs/architecture.md promises, held against the source tree.

#![allow(clippy::unwrap_used, reason = "a source that cannot be read fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All Rust sources under `dir`, as (path from the root, text).
fn sources(dir: &str) -> Vec<(String, String)> {
    fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() && !path.ends_with("target") {
                walk(&path, out);
            } else if path.extension().is_some_and(|e| e == "rs") {
                out.push(path);
            }
        }
    }
    let root = root();
    let mut paths = Vec::new();
    walk(&root.join(dir), &mut paths);
    assert!(!paths.is_empty(), "no sources under {dir}");
    paths
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
            (name, fs::read_to_string(&path).unwrap())
        })
        .collect()
}

/// Lines of `text` before its unit tests, without comments.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split("#[cfg(test)]")
        .next()
        .unwrap_or_default()
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
}

fn refuse(dir: &str, words: &[&str]) {
    for (name, text) in sources(dir) {
        for line in code(&text) {
            for word in words {
                assert!(
                    !line.contains(word),
                    "{name}: `{word}` does not belong into {dir}: {line}"
                );
            }
        }
    }
}

#[test]
fn the_core_has_no_io_clock_thread_or_unsafe() {
    let words = [
        "std::net",
        "std::fs",
        "std::thread",
        "std::os::",
        "Instant::now",
        "SystemTime",
        "unsafe {",
    ];
    refuse("smc-core/src", &words);
    // What is for tests may say what it does.
    for room in ["wire", "handshake", "connection", "link_group"] {
        refuse(&format!("smc-core/src/{room}"), &["println!", "std::env"]);
    }
}

#[test]
fn the_device_does_not_know_smc_and_the_room_device_does_not_know_virtio() {
    refuse("backend/src", &["smc_core", "guest_driver"]);
    refuse("backend/src/device", &["virtio_queue", "vhost::", "vhost_user"]);
}

#[test]
fn arrows_inside_the_driver_point_down() {
    refuse("guest-driver/src/sys", &["crate::transport", "crate::ism", "smc_core"]);
    refuse("guest-driver/src/transport", &["crate::ism", "crate::adapter", "smc_core"]);
    refuse("guest-driver/src/ism", &["crate::adapter", "crate::socket", "smc_core"]);
    refuse("guest-driver/src/adapter", &["crate::socket"]);
    refuse("guest-driver/src/verbs", &["crate::adapter", "crate::socket", "crate::ism"]);
    refuse("guest-driver/src/rendezvous", &["crate::", "smc_core", "virtio"]);
}

#[test]
fn wire_formats_use_nothing_above_them() {
    refuse("smc-core/src/wire", &["crate::handshake", "crate::connection", "crate::testing"]);
}

#[test]
fn unsafe_stays_in_its_rooms() {
    let allowed = [
        "backend/src/shm/",
        "guest-driver/src/sys/",
        "guest-driver/src/verbs/",
        "guest-driver/src/rendezvous/bpf.rs",
        "guest-driver/preload/src/hooks/",
        "guest-driver/preload/src/sys/",
    ];
    for dir in ["backend", "smc-core/src", "guest-driver"] {
        for (name, text) in sources(dir) {
            if allowed.iter().any(|room| name.starts_with(room)) || name.contains("/tests/") {
                continue;
            }
            for line in code(&text) {
                assert!(
                    !line.contains("unsafe {") && !line.contains("unsafe impl"),
                    "{name}: unsafe outside its rooms: {line}"
                );
            }
        }
    }
}

#[test]
fn files_stay_small_enough_to_hold_in_the_head() {
    for dir in ["backend", "smc-core", "guest-driver", "tests/src", "tests/tests"] {
        for (name, text) in sources(dir) {
            let lines = text.lines().count();
            assert!(lines <= 700, "{name} has {lines} lines");
        }
    }
}
