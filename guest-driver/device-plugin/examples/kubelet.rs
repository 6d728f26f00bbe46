// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A double of the kubelet for scripts, listening in the directory of its argument. For each line of its
//! input, the name of a resource, the double admits a container with one device of the resource, and prints
//! the CDI devices named by the plugin, or "refused" and the reason.
#![allow(clippy::unwrap_used, dead_code, reason = "a double that cannot go on ends")]

#[path = "../tests/kubelet/double.rs"]
mod double;

use std::io::BufRead;
use std::path::PathBuf;
use std::time::Duration;

use double::Kubelet;
use tokio::sync::mpsc;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let directory = PathBuf::from(std::env::args().nth(1).unwrap());
    let kubelet = Kubelet::start(&directory);
    let (sender, mut lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().for_each(|line| sender.send(line.unwrap()).unwrap());
    });
    while let Some(resource) = lines.recv().await {
        // A plugin may be about to register.
        for _ in 0..300 {
            if !kubelet.devices(&resource).is_empty() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        match kubelet.admit(&resource).await {
            Ok(devices) => println!("{}", devices.join(" ")),
            Err(status) => println!("refused: {status}"),
        }
    }
}
