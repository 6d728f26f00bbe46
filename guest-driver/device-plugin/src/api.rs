// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of the device plugin API v1beta1 sent or read by this program. Fields left at their defaults
//! are omitted: such fields take no bytes.

use prost::Message;

/// The version named by a plugin.
pub const VERSION: &str = "v1beta1";
/// The file name of the kubelet's socket, in the directory of all plugins.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
/// The state of an allocatable device.
pub const HEALTHY: &str = "Healthy";
/// Path of the kubelet's only call.
pub const REGISTER: &str = "/v1beta1.Registration/Register";
/// Path of the call for the options.
pub const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
/// Path of the stream of devices.
pub const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
/// Path of the call for a new container's device.
pub const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";

/// An answer without a value.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Empty {}

/// A plugin's first message to the kubelet.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegisterRequest {
    /// [`VERSION`].
    #[prost(string, tag = "1")]
    pub version: String,
    /// The file name of the plugin's socket.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The resource requested by pods.
    #[prost(string, tag = "3")]
    pub resource_name: String,
}

/// The devices of a resource.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListAndWatchResponse {
    /// The devices, in any order.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device for one container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// A name of at most 63 characters.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`], or something else.
    #[prost(string, tag = "2")]
    pub health: String,
}

/// The devices for the containers.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateRequest {
    /// One request for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// The devices for a container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateRequest {
    /// Names of the devices.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// The runtime's tasks for the containers.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateResponse {
    /// One for each container, in the order of the request.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// The runtime's tasks for a container.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateResponse {
    /// Devices of CDI specifications.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A device of a CDI specification.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct CdiDevice {
    /// Vendor, class and name.
    #[prost(string, tag = "1")]
    pub name: String,
}
