// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The plugin against a double of the kubelet: either side starts, restarts and dies in any order.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod double;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use double::Kubelet;
use smc_device_plugin::{Pool, serve};
use smc_test_support::{TIMEOUT, TestDir};
use tokio::task::JoinHandle;

const RED: &str = "virtio-ism/red";

/// The directory of the sockets.
struct Directory(TestDir);

impl Directory {
    fn new() -> Directory {
        Directory(TestDir::new())
    }

    /// A plugin of the pool red.
    fn plugin(&self) -> JoinHandle<()> {
        self.plugin_of("red=3")
    }

    /// A plugin of a pool.
    fn plugin_of(&self, pool: &str) -> JoinHandle<()> {
        let directory = self.0.to_owned();
        let pool: Pool = pool.parse().unwrap();
        tokio::spawn(async move { serve(pool, &directory).await })
    }
}

async fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < TIMEOUT, "{what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the kubelet knows all devices, and gives one to a container.
async fn is_in_use(kubelet: &Kubelet) {
    eventually("devices are reported", || kubelet.devices(RED).len() == 3).await;
    assert!(kubelet.devices(RED).iter().all(|device| device.health == "Healthy"));
    let devices = kubelet.allocate(RED, &["red-1"]).await.unwrap();
    assert_eq!(devices, ["virtio-ism/fabric=red"]);
}

#[tokio::test]
async fn devices_are_reported_at_once_and_containers_get_the_device_of_cdi() {
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    let plugin = directory.plugin();
    is_in_use(&kubelet).await;
    assert_eq!(kubelet.known.registrations.load(Ordering::Relaxed), 1);
    let refused = kubelet.allocate(RED, &["red-3"]).await.unwrap_err();
    assert!(refused.message().contains("no device"), "{refused}");
    plugin.abort();
}

#[tokio::test]
async fn a_plugin_waits_for_a_kubelet_that_starts_later() {
    let directory = Directory::new();
    let plugin = directory.plugin();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let kubelet = Kubelet::start(&directory.0);
    is_in_use(&kubelet).await;
    plugin.abort();
}

#[tokio::test]
async fn a_restarted_kubelet_knows_the_same_devices_again() {
    let directory = Directory::new();
    let plugin = directory.plugin();
    let mut kubelet = Kubelet::start(&directory.0);
    for attempt in 0..6 {
        is_in_use(&kubelet).await;
        kubelet.kill().await;
        // A kubelet killed before removing the plugins' sockets leaves them.
        kubelet = match attempt % 2 {
            0 => Kubelet::start(&directory.0),
            _ => Kubelet::start_beside(&directory.0),
        };
    }
    is_in_use(&kubelet).await;
    plugin.abort();
}

#[tokio::test]
async fn a_restarted_plugin_is_registered_again_and_leaves_no_socket() {
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    for _ in 0..3 {
        let plugin = directory.plugin();
        is_in_use(&kubelet).await;
        plugin.abort();
        let _ = plugin.await;
        assert!(!directory.0.join("virtio-ism-red.sock").exists());
        kubelet.forget();
    }
    // A killed plugin has left its socket.
    let _killed = std::os::unix::net::UnixListener::bind(directory.0.join("virtio-ism-red.sock"));
    let plugin = directory.plugin();
    is_in_use(&kubelet).await;
    plugin.abort();
}

#[tokio::test]
async fn a_socket_that_somebody_removes_is_made_and_registered_again() {
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    let plugin = directory.plugin();
    is_in_use(&kubelet).await;
    std::fs::remove_file(directory.0.join("virtio-ism-red.sock")).unwrap();
    let registrations = &kubelet.known.registrations;
    eventually("it registers again", || registrations.load(Ordering::Relaxed) == 2).await;
    is_in_use(&kubelet).await;
    plugin.abort();
}

#[tokio::test]
async fn a_kubelet_that_refuses_or_is_slow_is_asked_again() {
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    kubelet.known.refusals.store(3, Ordering::Relaxed);
    *kubelet.known.delay.lock().unwrap() = Duration::from_millis(400);
    let plugin = directory.plugin();
    is_in_use(&kubelet).await;
    assert_eq!(kubelet.known.registrations.load(Ordering::Relaxed), 4);
    plugin.abort();
}

#[tokio::test]
async fn a_kubelet_that_has_lost_its_connection_is_told_again() {
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    let plugin = directory.plugin();
    is_in_use(&kubelet).await;
    kubelet.forget();
    is_in_use(&kubelet).await;
    plugin.abort();
}

#[tokio::test]
async fn a_tenant_with_all_its_devices_takes_none_of_another_and_no_pod_has_both() {
    const BLUE: &str = "virtio-ism/blue";
    let directory = Directory::new();
    let kubelet = Kubelet::start(&directory.0);
    let plugins = [directory.plugin(), directory.plugin_of("blue=2")];
    let known = |resource, n| kubelet.devices(resource).len() == n;
    eventually("both are known", || known(RED, 3) && known(BLUE, 2)).await;
    for _ in 0..3 {
        assert_eq!(kubelet.admit(RED).await.unwrap(), ["virtio-ism/fabric=red"]);
    }
    kubelet.admit(RED).await.unwrap_err();
    for _ in 0..2 {
        assert_eq!(kubelet.admit(BLUE).await.unwrap(), ["virtio-ism/fabric=blue"]);
    }
    kubelet.admit(BLUE).await.unwrap_err();
    // A tenant whose pool this node does not have, and the name of another's device.
    kubelet.admit("virtio-ism/green").await.unwrap_err();
    kubelet.allocate(RED, &["blue-0"]).await.unwrap_err();
    plugins.iter().for_each(JoinHandle::abort);
}
