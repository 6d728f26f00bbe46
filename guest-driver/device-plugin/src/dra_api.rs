// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The messages of dynamic resource allocation between kubelet and driver: DRAPlugin v1, and the kubelet's
//! registration of plugins, v1.

use std::collections::BTreeMap;

use prost::Message;

/// The type of the driver among the kubelet's plugins.
pub const TYPE: &str = "DRAPlugin";
/// The service known to the kubelet by this name.
pub const SERVICE: &str = "v1.DRAPlugin";
/// Path of the kubelet's question who the driver is.
pub const INFO: &str = "/pluginregistration.Registration/GetInfo";
/// Path of the kubelet's word about a registration.
pub const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
/// Path of the call for claims of a new pod.
pub const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
/// Path of the call for claims without a pod.
pub const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";

/// A driver, as the kubelet registers the driver.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PluginInfo {
    /// [`TYPE`].
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The name of the driver.
    #[prost(string, tag = "2")]
    pub name: String,
    /// The path of the socket for claims.
    #[prost(string, tag = "3")]
    pub endpoint: String,
    /// [`SERVICE`].
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// The result of a registration.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct RegistrationStatus {
    /// Whether the driver is registered.
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    /// The reason of a refusal.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// Claims of pods of this node.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimsRequest {
    /// The claims.
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// A claim by its names.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    /// The namespace.
    #[prost(string, tag = "1")]
    pub namespace: String,
    /// The identity of the object.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// The name in the namespace.
    #[prost(string, tag = "3")]
    pub name: String,
}

/// The prepared claims.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PrepareResponse {
    /// One for each claim, by its identity.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Prepared>,
}

/// A prepared claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Prepared {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<PreparedDevice>,
    /// The reason of a failure.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device of a claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct PreparedDevice {
    /// The requests of the claim that have the device.
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    /// The pool of the ResourceSlice.
    #[prost(string, tag = "2")]
    pub pool_name: String,
    /// The device of the ResourceSlice.
    #[prost(string, tag = "3")]
    pub device_name: String,
    /// Devices of CDI specifications.
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
}

/// The claims that are prepared no more.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct UnprepareResponse {
    /// One for each claim, by its identity.
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, Unprepared>,
}

/// A claim that is prepared no more.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Unprepared {
    /// The reason of a failure.
    #[prost(string, tag = "1")]
    pub error: String,
}
