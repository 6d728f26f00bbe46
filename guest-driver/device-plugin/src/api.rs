// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of the device plugin API v1beta1 that this program sends or reads. Fields that it
//! leaves at their defaults are not here: they take no bytes.

use prost::Message;

/// The version that a plugin names.
pub const VERSION: &str = "v1beta1";
/// The file name of the kubelet's socket, in the directory of all plugins.
pub const KUBELET_SOCKET: &str = "kubelet.sock";
/// The state of a device that containers may have.
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

/// What a plugin says to the kubelet first.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegisterRequest {
    /// [`VERSION`].
    #[prost(string, tag = "1")]
    pub version: String,
    /// The file name of the plugin's socket.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// The resource that pods ask for.
    #[prost(string, tag = "3")]
    pub resource_name: String,
}

/// All devices of a resource.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ListAndWatchResponse {
    /// In any order.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device that one container can have.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Device {
    /// A name of at most 63 characters.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`], or something else.
    #[prost(string, tag = "2")]
    pub health: String,
}

/// Which devices containers get.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateRequest {
    /// One for each container.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// Which devices a container gets.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerAllocateRequest {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// What the runtime has to do for containers.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct AllocateResponse {
    /// One for each container, in the order of the request.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// What the runtime has to do for a container.
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
