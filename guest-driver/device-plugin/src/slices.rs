// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The ResourceSlice of a node: its pools, as devices for the scheduler.

use std::time::Duration;

use hyper::Method;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::api_server::{ApiError, ApiServer};
use crate::node::{DRIVER, Node};

/// The collection of all slices.
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
/// The shortest pause between two looks, and the longest pause after a failed one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// Keeps the slice of a node at the API server until the future is dropped: one that was changed or removed
/// is written again, after a registration with the kubelet, too, which removes slices of silent drivers.
pub(crate) async fn publish(node: &Node, server: &ApiServer, is_registered: &Notify) {
    let name = node.slice();
    let mut pause = PAUSES.0;
    loop {
        let looked = async {
            let version = write(node, server).await?;
            tokio::select! {
                changed = server.changed(SLICES, &name, &version) => changed,
                () = is_registered.notified() => Ok(()),
            }
        };
        pause = match looked.await {
            Ok(()) => PAUSES.0,
            Err(error) => {
                warn!(slice = name, %error, "the slice of the node cannot be published or watched");
                (pause * 2).min(PAUSES.1)
            }
        };
        tokio::time::sleep(pause).await;
    }
}

/// Writes the slice unless the right one is there. Returns the version of the object.
async fn write(node: &Node, server: &ApiServer) -> Result<String, ApiError> {
    let path = format!("{SLICES}/{}", node.slice());
    let answer = match server.call(Method::GET, &path, None).await {
        Err(error) if error.is_missing() => {
            let owner =
                server.call(Method::GET, &format!("/api/v1/nodes/{}", node.name()), None).await?;
            let slice = slice(
                node,
                1,
                json!({
                    "name": node.slice(),
                    // The slice is removed with the node.
                    "ownerReferences": [{
                        "apiVersion": "v1", "kind": "Node", "controller": true,
                        "name": node.name(), "uid": owner["metadata"]["uid"],
                    }],
                }),
            );
            server.call(Method::POST, SLICES, Some(&slice)).await?
        }
        Err(error) => return Err(error),
        Ok(found) => {
            let spec = &found["spec"];
            let generation = spec["pool"]["generation"].as_i64().unwrap_or_default();
            let wanted = slice(node, generation, found["metadata"].clone());
            if spec["driver"] != DRIVER || spec["nodeName"] != node.name() {
                // Both never change in a slice.
                server.call(Method::DELETE, &path, None).await?;
                return Box::pin(write(node, server)).await;
            }
            if has(&found, &wanted) {
                return Ok(version(&found));
            }
            let wanted = slice(node, generation.saturating_add(1), found["metadata"].clone());
            server.call(Method::PUT, &path, Some(&wanted)).await?
        }
    };
    info!(slice = node.slice(), "published");
    let devices = answer["spec"]["devices"].as_array().map_or(&[][..], Vec::as_slice);
    if devices.iter().any(|device| device["allowMultipleAllocations"] != true) {
        warn!(
            "the API server drops allowMultipleAllocations (feature DRAConsumableCapacity): one container \
               gets each pool"
        );
    }
    Ok(version(&answer))
}

fn version(object: &Value) -> String {
    object["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned()
}

/// A slice with the pools of a node.
fn slice(node: &Node, generation: i64, metadata: Value) -> Value {
    let device = |pool: &crate::plugin::Pool| {
        json!({
            "name": pool.name(),
            "attributes": {
                "pool": {"string": pool.name()},
                "fabric": {"string": pool.fabric()},
                "window": {"bool": true},
            },
            // Each container takes one.
            "allowMultipleAllocations": true,
            "capacity": {"containers": {
                "value": pool.containers().to_string(),
                "requestPolicy": {"default": "1", "validValues": ["1"]},
            }},
        })
    };
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": DRIVER,
            "nodeName": node.name(),
            "pool": {"name": node.name(), "generation": generation, "resourceSliceCount": 1},
            "devices": node.pools().iter().map(device).collect::<Vec<_>>(),
        },
    })
}

/// Whether all of a value is in another one, which may have more members: servers add defaults.
fn has(found: &Value, wanted: &Value) -> bool {
    match (found, wanted) {
        (Value::Object(found), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| found.get(key).is_some_and(|found| has(found, value)))
        }
        (Value::Array(found), Value::Array(wanted)) => {
            found.len() == wanted.len()
                && found.iter().zip(wanted).all(|(found, wanted)| has(found, wanted))
        }
        _ => found == wanted,
    }
}
