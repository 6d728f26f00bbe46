// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kubelet's requests to a plugin, and the answers.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use thiserror::Error;
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::Grpc;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::api::{self, AllocateRequest, AllocateResponse, Device, Empty, ListAndWatchResponse};

/// The vendor and the class of the CDI devices; resources have the same vendor.
const CLASS: &str = "virtio-ism/fabric";
/// The CHID of a daemon's pool without the option `chid`.
const DEFAULT_CHID: &str = "ff00";
/// The longest name of a pool.
const NAME_MAX: usize = 40;

/// A text without a valid name of a pool.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is no pool: NAME, NAME=CONTAINERS or NAME=CONTAINERS@CHID, with a name of up to {NAME_MAX} letters, \
     digits, - and _"
)]
pub struct NoPool(String);

/// A device pool of this node: one resource for pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    name: String,
    containers: usize,
    chid: u16,
}

impl std::str::FromStr for Pool {
    type Err = NoPool;

    fn from_str(text: &str) -> Result<Pool, NoPool> {
        let wrong = || NoPool(text.to_owned());
        let (name, rest) = text.split_once('=').unwrap_or((text, "32"));
        let (number, chid) = rest.split_once('@').unwrap_or((rest, DEFAULT_CHID));
        let containers = number.parse().map_err(|_| wrong())?;
        let chid = u16::from_str_radix(chid, 16).map_err(|_| wrong())?;
        let is_inner = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let is_end = |c: char| c.is_ascii_alphanumeric();
        let is_name = name.len() <= NAME_MAX
            && name.chars().all(is_inner)
            && name.starts_with(is_end)
            && name.ends_with(is_end);
        // The kubelet's messages have at most 4 MiB.
        if !is_name || !(1..=10_000).contains(&containers) {
            return Err(wrong());
        }
        Ok(Pool { name: name.to_owned(), containers, chid })
    }
}

impl Pool {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn containers(&self) -> usize {
        self.containers
    }

    /// The fabric of the pool's devices. Devices of one fabric reach each other.
    pub(crate) fn fabric(&self) -> String {
        format!("{:04x}", self.chid)
    }

    /// The resource requested by pods: `virtio-ism/NAME`.
    #[must_use]
    pub fn resource(&self) -> String {
        format!("virtio-ism/{}", self.name)
    }

    /// The CDI device for a container with the resource.
    #[must_use]
    pub fn cdi_device(&self) -> String {
        format!("{CLASS}={}", self.name)
    }

    /// The file name of the plugin's socket.
    #[must_use]
    pub fn socket(&self) -> String {
        format!("virtio-ism-{}.sock", self.name)
    }

    /// The devices, healthy regardless of the daemon: a container without a daemon is on TCP, and a kubelet
    /// starting while a device is not healthy refuses pods already using the device.
    fn devices(&self) -> Vec<Device> {
        let device = |i| Device { id: format!("{}-{i}", self.name), health: api::HEALTHY.into() };
        (0..self.containers).map(device).collect()
    }

    fn has(&self, id: &str) -> bool {
        let number = id.strip_prefix(&self.name).and_then(|rest| rest.strip_prefix('-'));
        number.and_then(|number| number.parse().ok()).is_some_and(|i: usize| i < self.containers)
    }

    fn allocate(&self, request: &AllocateRequest) -> Result<AllocateResponse, Status> {
        let mut ids = request.container_requests.iter().flat_map(|one| &one.device_ids);
        if let Some(unknown) = ids.find(|id| !self.has(id)) {
            let what = format!("{} has no device {unknown:?}", self.resource());
            return Err(Status::invalid_argument(what));
        }
        let device = || api::CdiDevice { name: self.cdi_device() };
        // A container with several devices of a pool sees the same pool.
        let answer = |one: &api::ContainerAllocateRequest| api::ContainerAllocateResponse {
            cdi_devices: one.device_ids.first().map(|_| device()).into_iter().collect(),
        };
        let container_responses = request.container_requests.iter().map(answer).collect();
        Ok(AllocateResponse { container_responses })
    }
}

/// The calls of one pool's plugin.
#[derive(Clone, Debug)]
pub struct DevicePlugin {
    pool: Arc<Pool>,
    watchers: Arc<AtomicUsize>,
}

impl DevicePlugin {
    /// The calls for a pool.
    #[must_use]
    pub fn new(pool: Pool) -> DevicePlugin {
        DevicePlugin { pool: Arc::new(pool), watchers: Arc::default() }
    }

    /// Whether a kubelet watches the devices. A kubelet watches while this plugin is registered.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Relaxed) > 0
    }
}

/// A stream, counted during its lifetime.
struct Watch(Arc<AtomicUsize>, Option<ListAndWatchResponse>);

impl Watch {
    fn new(plugin: &DevicePlugin) -> Watch {
        plugin.watchers.fetch_add(1, Ordering::Relaxed);
        let devices = plugin.pool.devices();
        Watch(plugin.watchers.clone(), Some(ListAndWatchResponse { devices }))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Stream for Watch {
    type Item = Result<ListAndWatchResponse, Status>;

    /// The devices at once, and then no update: the list never changes.
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.1.take().map_or(Poll::Pending, |devices| Poll::Ready(Some(Ok(devices))))
    }
}

impl Service<http::Request<Body>> for DevicePlugin {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let plugin = self.clone();
        Box::pin(async move {
            let answer = match request.uri().path() {
                // No option is set.
                api::OPTIONS => {
                    let codec = ProstCodec::<Empty, Empty>::default();
                    let call = |_: Request<Empty>| ready(Ok(Response::new(Empty {})));
                    Grpc::new(codec).unary(tower::service_fn(call), request).await
                }
                api::LIST_AND_WATCH => {
                    let codec = ProstCodec::<ListAndWatchResponse, Empty>::default();
                    let watch = move |_: Request<Empty>| {
                        ready(Ok::<_, Status>(Response::new(Watch::new(&plugin).fuse())))
                    };
                    Grpc::new(codec).server_streaming(tower::service_fn(watch), request).await
                }
                api::ALLOCATE => {
                    let codec = ProstCodec::<AllocateResponse, AllocateRequest>::default();
                    let allocate = move |request: Request<AllocateRequest>| -> Ready<_> {
                        ready(plugin.pool.allocate(request.get_ref()).map(Response::new))
                    };
                    Grpc::new(codec).unary(tower::service_fn(allocate), request).await
                }
                other => Status::unimplemented(format!("no call {other:?}")).into_http(),
            };
            Ok(answer)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_resource_and_a_device_of_cdi() {
        let pool: Pool = "red=2".parse().unwrap();
        assert_eq!(pool.resource(), "virtio-ism/red");
        assert_eq!(pool.cdi_device(), "virtio-ism/fabric=red");
        let ids: Vec<_> = pool.devices().into_iter().map(|device| device.id).collect();
        assert_eq!(ids, ["red-0", "red-1"]);
        let long = "x".repeat(NAME_MAX + 1);
        for wrong in ["", "-a", "a-", "a b", "a/b", "a=0", "a=x", "a=10001", "a=", &long] {
            assert_eq!(wrong.parse::<Pool>(), Err(NoPool(wrong.into())));
        }
    }

    #[test]
    fn a_container_gets_the_device_once_and_none_that_is_unknown() {
        let pool: Pool = "red=2".parse().unwrap();
        let request = |ids: &[&str]| AllocateRequest {
            container_requests: vec![api::ContainerAllocateRequest {
                device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
            }],
        };
        let answer = pool.allocate(&request(&["red-0", "red-1"])).unwrap();
        let devices = &answer.container_responses[0].cdi_devices;
        assert_eq!(devices[..], [api::CdiDevice { name: "virtio-ism/fabric=red".into() }]);
        for unknown in ["red-2", "blue-0", "red-", "red", ""] {
            let refused = pool.allocate(&request(&["red-0", unknown])).unwrap_err();
            assert!(refused.message().contains("has no device"), "{refused}");
        }
    }
}
