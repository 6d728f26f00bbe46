// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The checks.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use guest_driver::go_program::Door;
use ism_sys::Loader;
use smc_rendezvous::{KernelSockets, Policy, Rendezvous};
use smc_settings::{Place, PlaceReport};
use virtio_ism::transport::pci::{self, Binding};

use super::finding::{Finding, Status};
use super::{capacity, limits};
use crate::access::{self, Obstacle};
use crate::error::CliError;
use crate::run::inspect;
use crate::{kernel, paths};

/// The checks, in the order of need.
pub(super) fn all() -> Vec<Finding> {
    let mut findings = vec![kernel()];
    findings.extend(sockets());
    findings.push(functions());
    findings.push(rdma());
    findings.push(option());
    findings.extend(policy());
    findings.push(kernel_smc());
    findings.push(kernel_smc_for_all());
    findings.extend(limits::all());
    findings.extend(capacity::all());
    findings
}

/// The door of a program to the library of `smc run`.
///
/// # Errors
/// There is no such program.
pub(super) fn program(name: &OsStr) -> Result<Finding, CliError> {
    let text = name.to_string_lossy();
    let of = |status, says: &str| Finding::new("program", status, format!("{text}: {says}"));
    let no_program = |why| CliError::NoProgram { program: text.clone().into_owned(), why };
    let path = inspect::find(name).map_err(no_program)?;
    Ok(match inspect::door(&path) {
        Some(Ok(Door::Libc)) => of(Status::Ok, "smc run replaces its calls of libc"),
        Some(Ok(Door::SystemCalls)) => {
            of(Status::Ok, "it is written in Go, and smc run --go takes over its system calls")
        }
        Some(Ok(door)) => match Loader::start() {
            Ok(loader) => {
                loader.withdraw();
                let says = match door {
                    Door::Dispatch => {
                        "it is a static program, and smc run --system-calls loads the library and has \
                         the kernel refuse its system calls for the library"
                    }
                    Door::DispatchOfMusl => {
                        "it is linked with musl, and smc run --system-calls loads the library beside \
                         musl and has the kernel refuse its system calls for the library"
                    }
                    _ => {
                        "it is a static program in Go, and smc run --go loads the library and takes \
                         over its system calls"
                    }
                };
                of(Status::Ok, says)
            }
            Err(why) => of(Status::No, &format!("stays on TCP under smc run: {why}")),
        },
        Some(Err(why)) => of(Status::No, &format!("stays on TCP under smc run: {why}")),
        None => of(Status::Broken, "the file does not tell whether smc run reaches it"),
    })
}

fn kernel() -> Finding {
    let uname = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    let says =
        format!("{} {} on {}", text(uname.sysname()), text(uname.release()), text(uname.machine()));
    Finding::new("kernel", Status::Ok, says)
}

/// Devices of a daemon on this host, reached through sockets: the device named by SMC_DEVICE, or
/// the devices of each place searched for a fabric.
fn sockets() -> Vec<Finding> {
    let named = std::env::var_os("SMC_DEVICE").map(PathBuf::from);
    // PCI addresses are checked by `functions`.
    if let Some(path) = named.filter(|path| path.components().count() > 1) {
        return vec![socket(&path, paths::listens(&path))];
    }
    let mut findings = Vec::new();
    let mut empty = Vec::new();
    for PlaceReport { place, directory, sockets } in Place::ALL.into_iter().map(PlaceReport::at) {
        match sockets {
            Ok(sockets) => {
                let found = sockets.iter().map(|path| socket(path, Ok(())));
                findings.extend(found);
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied && place != Place::Own => {
                findings.push(socket(&directory.join(paths::POOL), Err(error)));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                empty.push(directory.display().to_string());
            }
            Err(error) => {
                let says = format!("{}: {error}", directory.display());
                findings.push(Finding::new(FABRIC, Status::Broken, says).grant("smc fabric"));
            }
        }
    }
    if findings.is_empty() {
        let says = format!("no daemon's sockets in {}", empty.join(", "));
        let grant = "systemctl start vhost-device-ism     # as root, of the package\nsmc fabric";
        findings.push(Finding::new(FABRIC, Status::No, says).grant(grant));
    }
    findings
}

/// The policy file of this machine, if there is one.
fn policy() -> Option<Finding> {
    let settings = crate::settings::load().unwrap_or_default();
    let named = std::env::var_os("SMC_POLICY").map(PathBuf::from).or(settings.policy);
    let is_named = named.is_some();
    let file = named.or_else(smc_settings::policy_file)?;
    let policy = match Policy::load(&file) {
        Ok(policy) => policy,
        Err(error) if error.is_missing() && !is_named => return None,
        Err(error) => {
            let says = format!("{}: running programs keep their rules", error.in_file(&file));
            return Some(Finding::new("policy", Status::Broken, says));
        }
    };
    if let Some(key) = policy.unknown().first() {
        let says = format!("{}: {key}", file.display());
        return Some(Finding::new("policy", Status::Broken, says));
    }
    let shares: Vec<_> = policy.shares().map(|share| share.to_string()).collect();
    let shares = match shares.is_empty() {
        true => String::new(),
        false => format!("; shares of connections: {}", shares.join(", ")),
    };
    let rules = if policy.len() == 1 { "1 rule".into() } else { format!("{} rules", policy.len()) };
    let says = format!("{}: {rules}{shares}", file.display());
    Some(Finding::new("policy", Status::Ok, says))
}

const FABRIC: &str = "fabric";

fn socket(path: &Path, listens: std::io::Result<()>) -> Finding {
    let error = match listens {
        Ok(()) => {
            return Finding::new(FABRIC, Status::Ok, path.display().to_string()).carries_bytes();
        }
        Err(error) => error,
    };
    match access::obstacle(path) {
        Some(Obstacle { says, grant }) => {
            let says = format!("{}: {says}", path.display());
            Finding { grant, ..Finding::new(FABRIC, Status::Broken, says) }
        }
        None => {
            let says = format!("{}: {error}", path.display());
            Finding::new(FABRIC, Status::Broken, says).grant("smc fabric")
        }
    }
}

/// Devices of this virtual machine.
fn functions() -> Finding {
    const NAME: &str = "virtio-ism";
    let functions = match pci::functions() {
        Ok(functions) => functions,
        Err(error) => return Finding::new(NAME, Status::Broken, format!("PCI: {error}")),
    };
    let handed_out = |binding: &Binding| {
        matches!(binding, Binding::Vfio(_) | Binding::VfioIommu(_) | Binding::Uio(_))
    };
    let count = functions.len();
    let usable = functions.iter().filter(|function| handed_out(&function.binding)).count();
    let of_kernel =
        |binding: &Binding| matches!(binding, Binding::Other(name) if name == "virtio-pci");
    let kernel_has = functions.iter().any(|function| of_kernel(&function.binding))
        && kernel::has_sockets()
        && kernel::devices().is_ok_and(|devices| !devices.is_empty());
    match (count, usable) {
        (0, _) => Finding::new(NAME, Status::No, "no PCI device 1af4:106c in this machine")
            .grant("QEMU: -device vhost-user-ism-pci,chardev=... (docs/virtual-machines.md)"),
        (_, 0) if kernel_has => Finding::new(
            NAME,
            Status::Ok,
            format!("{count} PCI, with the kernel's SMC: see af_smc"),
        ),
        (_, 0) => {
            Finding::new(NAME, Status::Broken, format!("{count} PCI, none given to programs"))
                .grant("smc devices --bind     # as root, once after boot")
        }
        _ => {
            let says = format!("{usable} of {count} PCI devices given to programs");
            Finding::new(NAME, Status::Ok, says).carries_bytes()
        }
    }
}

/// RDMA adapters.
fn rdma() -> Finding {
    const NAME: &str = "rdma";
    let devices = match smc_verbs::devices() {
        Ok(devices) => devices,
        Err(reason) => {
            let finding = Finding::new(NAME, Status::No, reason.to_string());
            return match reason {
                smc_verbs::VerbsUnavailable::Library(_) => {
                    finding.grant("apt-get install libibverbs1 ibverbs-providers")
                }
                smc_verbs::VerbsUnavailable::Device => {
                    finding.grant("rdma link add rxe0 type rxe netdev eth0     # in software")
                }
                smc_verbs::VerbsUnavailable::Permission(node) => {
                    let node = node.display();
                    let who = rustix::process::getuid().as_raw();
                    Finding { status: Status::Broken, ..finding }
                        .grant(format!("setfacl -m u:{who}:rw {node}"))
                }
            };
        }
    };
    let mut active = Vec::new();
    let mut other = Vec::new();
    for device in devices {
        match describe(&device) {
            Ok(text) => active.push(text),
            Err(why) => other.push(format!("{}: {why}", device.name())),
        }
    }
    match active.is_empty() {
        false => Finding::new(NAME, Status::Ok, active.join("; ")).carries_bytes(),
        true => Finding::new(NAME, Status::Broken, other.join("; "))
            .grant("ip link set DEV up; ip addr add ADDR/LEN dev DEV     # its net device"),
    }
}

fn describe(device: &smc_verbs::DeviceInfo) -> Result<String, String> {
    let context = smc_verbs::Context::open(device).map_err(|error| error.to_string())?;
    let port = context.port(1).map_err(|error| error.to_string())?;
    if !port.is_active() {
        return Err(format!("port 1 is {:?}", port.state).to_lowercase());
    }
    let gids = context.gids(1).map_err(|error| error.to_string())?;
    let gid = gids.iter().find(|entry| entry.net_device.is_some());
    let gid = gid.ok_or("port 1 has no RoCE GID, so no address")?;
    let net = gid.net_device.as_ref().map_or("", |net| &net.name);
    Ok(format!("{} on {net}, {} GIDs", device.name(), gids.len()))
}

/// TCP option 254.
fn option() -> Finding {
    const NAME: &str = "option-254";
    match Rendezvous::open(smc_rendezvous::Options::default()) {
        Ok(rendezvous) => {
            let says = match rendezvous.cgroup() {
                Some(cgroup) => format!("eBPF on {}: peers are found by TCP", cgroup.display()),
                None => "granted to this cgroup: peers are found by TCP".to_owned(),
            };
            Finding::new(NAME, Status::Ok, says)
        }
        // The text names the command granting the option.
        Err(missing) => {
            let says = format!(
                "cannot be used, so servers that speak SMC must be named by --peer: {missing}"
            );
            Finding::new(NAME, Status::No, says)
        }
    }
}

/// The kernel's own SMC: a possible peer, but not needed.
fn kernel_smc() -> Finding {
    const NAME: &str = "af_smc";
    if !kernel::has_sockets() {
        return Finding::new(NAME, Status::No, "the kernel has no SMC of its own (not needed)");
    }
    let devices = match kernel::devices() {
        Ok(devices) => devices,
        Err(error) => return Finding::new(NAME, Status::Broken, format!("its devices: {error}")),
    };
    if devices.is_empty() {
        let says = "the kernel has SMC of its own, without an ISM device (not needed)";
        return Finding::new(NAME, Status::Ok, says);
    }
    let devices = devices.iter().map(|device| format!("{} (CHID {})", device.name, device.chid));
    let devices = devices.collect::<Vec<_>>().join(", ");
    match kernel::ueids() {
        Ok(ueids) if ueids.is_empty() => {
            let says = format!("{devices}, but no enterprise id, so its connections are TCP");
            Finding::new(NAME, Status::Broken, says).grant("smcd ueid add VIRTIO-ISM     # as root")
        }
        Ok(ueids) => {
            let says = format!("{devices}, enterprise ids {}", ueids.join(", "));
            let says = format!("{says}: \"smc run --stack kernel\"");
            Finding::new(NAME, Status::Ok, says).carries_bytes()
        }
        Err(error) => Finding::new(NAME, Status::Broken, format!("its enterprise ids: {error}")),
    }
}

/// Whether the kernel can make sockets of AF_SMC for programs without libc, too.
fn kernel_smc_for_all() -> Finding {
    const NAME: &str = "af_smc-bpf";
    let file = |path: &str| Path::new(path).exists();
    let needs = [
        ("SMC", "CONFIG_SMC; \"modprobe smc\"", kernel::has_sockets()),
        ("BTF", "CONFIG_DEBUG_INFO_BTF", file("/sys/kernel/btf/vmlinux")),
        ("a BPF JIT", "CONFIG_BPF_JIT", file("/proc/sys/net/core/bpf_jit_enable")),
        ("MPTCP", "CONFIG_MPTCP", file("/proc/sys/net/mptcp")),
    ];
    let missing = needs.into_iter().filter(|(_, _, there)| !there);
    let missing: Vec<_> = missing.map(|(name, option, _)| format!("{name} ({option})")).collect();
    let why = match missing.is_empty() {
        true => KernelSockets::check().err().map(|why| why.to_string()),
        false => Some(format!("the kernel lacks {}", missing.join(", "))),
    };
    if let Some(why) = why {
        let says = format!("the kernel's SMC is not for programs without libc: {why} (not needed)");
        return Finding::new(NAME, Status::No, says);
    }
    let carrier = match file(af_smc::DIBS) {
        true => "",
        false => ", on RDMA adapters only: the kernel has no ISM devices (CONFIG_DIBS)",
    };
    let says = format!(
        "programs without libc get the kernel's SMC by \"smc run --stack kernel\" and \"smc grant \
         --kernel\"{carrier}"
    );
    Finding::new(NAME, Status::Ok, says)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_door_of_a_program_is_named() {
        let of = |name: &str| program(OsStr::new(name)).unwrap();
        let shell = of("sh");
        assert_eq!(
            (shell.status, shell.says.as_str()),
            (Status::Ok, "sh: smc run replaces its calls of libc")
        );
        for name in ["/etc/passwd", "no-such-program"] {
            assert!(program(OsStr::new(name)).is_err());
        }
    }
}
