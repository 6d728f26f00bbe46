// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts of the virtual machines: kernel, QEMU, images, and programs of this repository.
//!
//! Scripts build kernel and QEMU once and keep them outside of the repository ([`crate::cache`]). Cargo
//! builds the programs, with the features of the whole workspace: so every release build of the workspace
//! shares its artifacts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::cache::{self, Build};
use crate::image::{self, Contents};
use crate::packages::{self, Programs};
use crate::programs;
use crate::tool::{self, ToolError};

/// Selects all packages, and the tests of virtual machines.
const WORKSPACE: [&str; 4] = ["--release", "--workspace", "--features", "smc-tests/vm"];
/// Programs run by the guests or the tests.
const BINARIES: [&str; 3] = ["vhost-device-ism", "smc", "smc-test-peer"];
/// Test programs: the tests of virtual machines, and test programs for guests.
const TESTS: [&str; 4] = ["vm", "conformance", "verbs_rxe", "rendezvous"];
/// The tests under user-mode Linux.
const UML_TESTS: [&str; 1] = ["uml"];

/// Paths of executables, by name.
type Executables = Vec<(String, PathBuf)>;

#[derive(Debug)]
pub(crate) struct Artifacts {
    pub(crate) kernel: PathBuf,
    /// A kernel whose AF_SMC speaks version 1 of SMC-R over soft-RoCE.
    pub(crate) kernel_v1: PathBuf,
    pub(crate) initrd: PathBuf,
    /// The initramfs with whole test programs for guests.
    pub(crate) initrd_tests: PathBuf,
    /// The initramfs with programs of the distribution.
    pub(crate) initrd_programs: Option<PathBuf>,
    pub(crate) qemu: PathBuf,
    pub(crate) qemu_stock: PathBuf,
    pub(crate) daemon: PathBuf,
    /// The executable of the tests.
    pub(crate) tests: PathBuf,
}

impl Artifacts {
    /// Environment variables with the artifacts' paths for the tests.
    pub(crate) fn variables(&self) -> Vec<(&'static str, &Path)> {
        let mut variables: Vec<(_, &Path)> = vec![
            ("KERNEL", &self.kernel),
            ("KERNEL_V1", &self.kernel_v1),
            ("INITRD", &self.initrd),
            ("INITRD_TESTS", &self.initrd_tests),
            ("QEMU", &self.qemu),
            ("QEMU_STOCK", &self.qemu_stock),
            ("DAEMON", &self.daemon),
        ];
        variables.extend(self.initrd_programs.as_deref().map(|path| ("INITRD_PROGRAMS", path)));
        variables
    }
}

/// Builds missing artifacts. Kernel and QEMU can be given by `KERNEL`, `KERNEL_V1`, `QEMU`, `QEMU_STOCK`.
/// Missing packages are installed if `install` is true.
///
/// # Errors
/// Packages are missing, or a build fails. The build's output has been shown.
pub(crate) fn build(root: &Path, install: bool, which: Programs) -> Result<Artifacts, ToolError> {
    let has_programs = packages::ensure(root, which, install)?;
    let busybox = image::busybox()?;
    let verbs = image::verbs()?;
    let [ip, tc] = ["ip", "tc"].map(|name| image::program_of(name, "iproute2"));
    let (ip, tc) = (ip?, tc?);
    // Each of the three keeps only one processor busy for a long time.
    let (kernels, qemus, built) = std::thread::scope(|scope| {
        let kernels = scope.spawn(|| script(root, Build::Kernel, "--v1"));
        let qemus = scope.spawn(|| script(root, Build::Qemu, "--stock"));
        let built = build_programs(root, &TESTS);
        (joined(kernels), joined(qemus), built)
    });
    let ([kernel, kernel_v1], [qemu, qemu_stock], programs) = (kernels?, qemus?, built?);

    let daemon = find(&programs, "vhost-device-ism")?;
    let tests = find(&programs, "vm")?;
    let named = |programs: Vec<(&str, PathBuf)>| {
        programs.into_iter().map(|(name, path)| (name.to_owned(), path)).collect::<Vec<_>>()
    };
    let images = images_of(root, &daemon);
    let mut files = verbs;
    match kernel.parent().filter(|directory| directory.join("source").is_dir()) {
        Some(directory) => {
            let driver = module(root, directory, &images.join("module"))?;
            files.push(("lib/modules/virtio_ism.ko".to_owned(), driver));
        }
        None => eprintln!("xtask: no source/ beside {}: no kernel's driver", kernel.display()),
    }
    let mut contents = Contents {
        kind: "initrd",
        busybox,
        init: root.join("tests/vm/init"),
        programs: named(vec![
            ("smc", find(&programs, "smc")?),
            ("smc-test-peer", find(&programs, "smc-test-peer")?),
            ("ip", ip),
            ("tc", tc),
        ]),
        files,
    };
    let initrd = image::write(&contents, &images)?;
    // Each guest unpacks its whole image. Most guests have an image without these programs.
    contents.kind = "tests";
    let usual = contents.programs.len();
    contents.programs.extend(named(vec![
        ("conformance", find(&programs, "conformance")?),
        ("verbs-rxe", find(&programs, "verbs_rxe")?),
        ("rendezvous", find(&programs, "rendezvous")?),
    ]));
    let initrd_tests = image::write(&contents, &images)?;
    contents.programs.truncate(usual);
    let initrd_programs = if has_programs {
        let found = match which {
            Programs::Small => programs::small()?,
            Programs::All => programs::all(root, &images)?,
        };
        contents.kind = if which == Programs::All { "all-programs" } else { "programs" };
        contents.programs.extend(found.programs);
        contents.files.extend(found.files);
        let library = find(&programs, "libsmc_preload.so")?;
        contents.files.push(("lib/libsmc_preload.so".into(), library));
        Some(image::write(&contents, &images)?)
    } else {
        None
    };
    Ok(Artifacts {
        kernel,
        kernel_v1,
        initrd,
        initrd_tests,
        initrd_programs,
        qemu,
        qemu_stock,
        daemon,
        tests,
    })
}

/// Programs of the tests under user-mode Linux.
#[derive(Debug)]
pub(crate) struct UmlPrograms {
    pub(crate) daemon: PathBuf,
    pub(crate) peer: PathBuf,
    pub(crate) smc: PathBuf,
    /// The library of `smc run`.
    pub(crate) preload: PathBuf,
    /// The executable of the tests.
    pub(crate) tests: PathBuf,
}

/// Builds the programs of the tests under user-mode Linux.
///
/// # Errors
/// A build fails. The build's output has been shown.
pub(crate) fn build_uml(root: &Path) -> Result<UmlPrograms, ToolError> {
    let built = build_programs(root, &UML_TESTS)?;
    Ok(UmlPrograms {
        daemon: find(&built, "vhost-device-ism")?,
        peer: find(&built, "smc-test-peer")?,
        smc: find(&built, "smc")?,
        preload: find(&built, "libsmc_preload.so")?,
        tests: find(&built, "uml")?,
    })
}

/// Builds the driver for the kernel of a directory, and checks the driver. Returns its path.
///
/// # Errors
/// The build or a check fails. The reason has been shown.
pub(crate) fn module(root: &Path, kernel: &Path, out: &Path) -> Result<PathBuf, ToolError> {
    let mut script = Command::new(root.join("tests/uml/module.sh"));
    script.arg(kernel).arg(out);
    let text = tool::output(script)?;
    Ok(PathBuf::from(text.lines().last().unwrap_or_default()))
}

/// The directory of the images, and of the kept logs.
pub(crate) fn images(root: &Path, artifacts: &Artifacts) -> PathBuf {
    images_of(root, &artifacts.daemon)
}

fn images_of(root: &Path, daemon: &Path) -> PathBuf {
    // <target>/release/vhost-device-ism
    daemon.ancestors().nth(2).unwrap_or(root).join("vm")
}

/// Runs a script for each of its two results. `second` is the option for the second one.
fn script(root: &Path, build: Build, second: &str) -> Result<[PathBuf; 2], ToolError> {
    let script = build.script(root);
    let given = build.variables().map(std::env::var_os);
    let path = |n: usize, args: &[&str]| match &given[n] {
        Some(path) => Ok(PathBuf::from(path)),
        None => tool::last_line(&script, args),
    };
    Ok([path(0, &[])?, path(1, &[second])?])
}

/// Builds the programs of this repository, and its test programs.
fn build_programs(root: &Path, tests: &[&str]) -> Result<Executables, ToolError> {
    eprintln!("xtask: builds the programs (some minutes the first time)");
    let mut args = vec!["build", "--lib"];
    BINARIES.iter().for_each(|name| args.extend(["--bin", name]));
    tests.iter().for_each(|name| args.extend(["--test", name]));
    cargo(root, &args)
}

/// Waits for a thread and returns its result.
fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The executable of an example of the tests.
///
/// # Errors
/// The build fails.
pub(crate) fn example(root: &Path, name: &str) -> Result<PathBuf, ToolError> {
    find(&cargo(root, &["build", "--example", name])?, name)
}

/// The back end of virtio sockets, for measurements: `VSOCK_DAEMON`, or the one of the rust-vmm project
/// from crates.io, kept in the cache. `None`, aloud, if neither is there.
///
/// # Errors
/// There is no directory for a cache.
pub(crate) fn vsock() -> Result<Option<PathBuf>, ToolError> {
    const NAME: &str = "vhost-device-vsock";
    const VERSION: &str = "0.3.0";
    if let Some(path) = std::env::var_os("VSOCK_DAEMON") {
        return Ok(Some(path.into()));
    }
    let root = cache::directory()?.join(format!("{NAME}-{VERSION}"));
    let program = root.join("bin").join(NAME);
    if program.is_file() {
        return Ok(Some(program));
    }
    eprintln!("xtask: installs {NAME} {VERSION} from crates.io (a minute or two, once)");
    let mut install =
        Command::new(std::env::var_os("CARGO").ok_or(ToolError::NoVariable("CARGO"))?);
    install.args(["install", "--quiet", "--locked", "--version", VERSION, "--root"]);
    install.arg(&root).arg(NAME).stdout(Stdio::null());
    if tool::status(install)?.success() {
        return Ok(Some(program));
    }
    eprintln!("xtask: no {NAME}: virtio sockets are not measured");
    Ok(None)
}

/// Runs cargo and returns the built executables and shared libraries, by name of their target.
fn cargo(root: &Path, args: &[&str]) -> Result<Executables, ToolError> {
    let cargo = std::env::var_os("CARGO").ok_or(ToolError::NoVariable("CARGO"))?;
    let mut command = Command::new(cargo);
    command.current_dir(root).args(args).args(WORKSPACE);
    command.arg("--message-format=json-render-diagnostics");
    let text = tool::output(command)?;
    let messages = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    // A library by its file's name: the program `smc` and the library for C are targets of one name.
    let executable = |message: Value| {
        if let Some(file) = message["executable"].as_str() {
            return Some((message["target"]["name"].as_str()?.to_owned(), PathBuf::from(file)));
        }
        let mut files = message["filenames"].as_array()?.iter().filter_map(Value::as_str);
        let file = Path::new(files.find(|file| file.ends_with(".so"))?);
        Some((file.file_name()?.to_str()?.to_owned(), file.to_owned()))
    };
    Ok(messages.filter_map(executable).collect())
}

fn find(built: &[(String, PathBuf)], name: &str) -> Result<PathBuf, ToolError> {
    let found = built.iter().find(|(target, _)| target == name);
    found.map(|(_, path)| path.clone()).ok_or_else(|| ToolError::Answer {
        program: "cargo".to_owned(),
        what: format!("has built no {name}"),
    })
}
