// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The RNICs of this machine.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::library::{Functions, functions};
use super::{NetDevice, VerbsError, VerbsUnavailable, ffi, gid};

/// An RNIC accessible to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    name: String,
    node: PathBuf,
}

impl DeviceInfo {
    /// Name of the device, such as `mlx5_0` or `rxe0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device file, such as `/dev/infiniband/uverbs0`.
    pub fn node(&self) -> &Path {
        &self.node
    }

    /// Network devices whose addresses are in the GID table of the device, each once. Empty if
    /// the kernel does not name them, and while the device has no GID.
    pub fn net_devices(&self) -> Vec<NetDevice> {
        gid::net_devices(&self.name)
    }
}

/// The library's list of devices. Its entries live as long as the list.
pub(super) struct List {
    functions: &'static Functions,
    start: *mut *mut ffi::Device,
    len: usize,
}

impl List {
    pub(super) fn new() -> Result<List, VerbsUnavailable> {
        let functions = functions()?;
        let mut count: c_int = 0;
        // SAFETY: the library writes the number of entries to the argument.
        let start = unsafe { (functions.ibv_get_device_list)(&raw mut count) };
        if start.is_null() {
            // ENOSYS: the kernel has no RDMA. With any other error, too, there is no usable device.
            tracing::debug!(error = %io::Error::last_os_error(), "no list of RDMA devices");
            return Err(VerbsUnavailable::Device);
        }
        Ok(List { functions, start, len: usize::try_from(count).unwrap_or(0) })
    }

    /// The devices, with pointers valid as long as the list.
    pub(super) fn entries(&self) -> impl Iterator<Item = (*mut ffi::Device, DeviceInfo)> + '_ {
        (0..self.len).filter_map(|i| {
            // SAFETY: the list has `len` entries, pointers to devices as long-lived as the list.
            let (device, entry) = unsafe {
                let device = *self.start.add(i);
                (device, device.as_ref()?)
            };
            // SMC-R needs channel adapters with the InfiniBand transport, the transport of RoCE.
            // Other transports (iWARP) cannot carry SMC-R.
            if entry.node_type != ffi::NODE_CA || entry.transport_type != ffi::TRANSPORT_IB {
                return None;
            }
            let name = text(&entry.name)?;
            let node = Path::new("/dev/infiniband").join(text(&entry.dev_name)?);
            #[cfg(feature = "double")]
            let node = super::double::node().unwrap_or(node);
            Some((device, DeviceInfo { name, node }))
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: `start` came from ibv_get_device_list, and `drop` frees the list once.
        unsafe { (self.functions.ibv_free_device_list)(self.start) };
    }
}

fn text(chars: &[c_char]) -> Option<String> {
    // A `char` has a sign on some machines and none on others.
    let bytes: Vec<u8> = chars.iter().flat_map(|c| c.to_ne_bytes()).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?.to_str().ok()?;
    (!text.is_empty() && !text.contains('/')).then(|| text.to_owned())
}

/// The RNICs of this machine accessible to this process, one at least.
///
/// # Errors
/// [`VerbsUnavailable`] says why there is none.
pub fn devices() -> Result<Vec<DeviceInfo>, VerbsUnavailable> {
    let list = List::new()?;
    usable(list.entries().map(|(_, info)| info), |node| {
        #[cfg(feature = "double")]
        if super::double::is_node(node) {
            return true;
        }
        access(node, Access::READ_OK | Access::WRITE_OK).is_ok()
    })
}

fn usable(
    all: impl Iterator<Item = DeviceInfo>,
    may_open: impl Fn(&Path) -> bool,
) -> Result<Vec<DeviceInfo>, VerbsUnavailable> {
    let (usable, refused): (Vec<_>, Vec<_>) = all.partition(|info| may_open(&info.node));
    match (usable.is_empty(), refused.into_iter().next()) {
        (false, _) => Ok(usable),
        (true, Some(first)) => Err(VerbsUnavailable::Permission(first.node)),
        (true, None) => Err(VerbsUnavailable::Device),
    }
}

/// Opens the device now having the name in `info`.
pub(super) fn open(
    info: &DeviceInfo,
) -> Result<(&'static Functions, *mut ffi::Context), VerbsError> {
    let list = List::new()?;
    let functions = list.functions;
    let Some((device, _)) = list.entries().find(|(_, entry)| entry.name == info.name) else {
        return Err(VerbsError::Gone(info.name.clone()));
    };
    // SAFETY: the device is in the live list; an open device outlives it.
    let context = unsafe { (functions.ibv_open_device)(device) };
    if context.is_null() {
        let source = io::Error::last_os_error();
        return Err(match source.kind() {
            io::ErrorKind::PermissionDenied => {
                VerbsUnavailable::Permission(info.node.clone()).into()
            }
            _ => VerbsError::Call { call: "ibv_open_device", source },
        });
    }
    Ok((functions, context))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(name: &str) -> DeviceInfo {
        DeviceInfo { name: name.to_owned(), node: Path::new("/dev/infiniband").join(name) }
    }

    #[test]
    fn a_host_answers_quietly_whether_it_has_rdma() {
        match devices() {
            Ok(list) => assert!(!list.is_empty()),
            Err(reason) => assert!(reason.to_string().starts_with("no "), "{reason}"),
        }
    }

    #[test]
    fn the_reason_for_having_none_is_told() {
        let two = || [info("a"), info("b")].into_iter();
        assert_eq!(usable(two(), |_| true).unwrap().len(), 2);
        assert_eq!(usable(two(), |node| node.ends_with("b")).unwrap(), [info("b")]);
        let node = PathBuf::from("/dev/infiniband/a");
        assert_eq!(usable(two(), |_| false), Err(VerbsUnavailable::Permission(node)));
        assert_eq!(usable([].into_iter(), |_| true), Err(VerbsUnavailable::Device));
    }

    #[test]
    fn opening_what_is_not_there_says_so() {
        let error = open(&info("nobody0")).unwrap_err();
        assert!(matches!(error, VerbsError::Gone(_) | VerbsError::Unavailable(_)), "{error}");
    }

    #[test]
    fn names_of_the_library_are_not_trusted_to_end() {
        let chars =
            |bytes: &[u8]| bytes.iter().map(|b| c_char::from_ne_bytes([*b])).collect::<Vec<_>>();
        assert_eq!(text(&chars(b"rxe0\0junk")), Some("rxe0".to_owned()));
        assert_eq!(text(&chars(b"rxe0")), None);
        assert_eq!(text(&chars(b"\0")), None);
        assert_eq!(text(&chars(b"../x\0")), None);
    }
}
