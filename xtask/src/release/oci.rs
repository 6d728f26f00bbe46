// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The container image, as an archive in the image layout of OCI 1.1: `podman load`, `skopeo copy
//! oci-archive:` and `ctr image import` read it. Its root file system is one layer, the programs another.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::label::{VERSION, date};
use super::sums;
use crate::package;
use crate::tool::{self, ToolError, at, wrong};

/// The place of the programs in the image, as for the Containerfile of packaging/kubernetes.
const PREFIX: &str = "usr/local/vhost-device-ism";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Writes the image into a directory: the root file system `base`, and the files of `tree`.
///
/// # Errors
/// A file cannot be read or written, or `base` is no tar archive.
pub(super) fn write(base: &Path, tree: &Path, place: &Path) -> Result<PathBuf, ToolError> {
    let layout = place.join("image.new");
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(at(&blobs))?;
    let mut test = Command::new("tar");
    test.arg("--list").arg("--file").arg(base).stdout(std::process::Stdio::null());
    tool::succeed(&mut test)?;
    let first = layout.join("base.tar");
    fs::copy(base, &first).map_err(at(base))?;
    let second = layout.join("programs.tar");
    tool::succeed(tar(tree, &second).arg(format!("--transform=s,^\\./,{PREFIX}/,")).arg("./"))?;
    let layers = [layer(&blobs, &first)?, layer(&blobs, &second)?];
    let created = date()?;
    let history = ["root file system", "vhost-device-ism"].map(
        |of| json!({ "created": created, "created_by": format!("cargo xtask release: {of}") }),
    );
    let image = json!({
        "created": created,
        "architecture": match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        },
        "os": "linux",
        "config": { "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"] },
        "rootfs": { "type": "layers", "diff_ids": layers.each_ref().map(|(id, _)| id) },
        "history": history,
    });
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": blob(&blobs, CONFIG, &image)?,
        "layers": layers.map(|(_, layer)| layer),
    });
    let mut own = blob(&blobs, MANIFEST, &manifest)?;
    own["annotations"] = json!({ "org.opencontainers.image.ref.name": VERSION });
    let index = json!({ "schemaVersion": 2, "manifests": [own] });
    package::write(&layout.join("index.json"), &index.to_string())?;
    package::write(&layout.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let archive = format!("vhost-device-ism-{VERSION}-{}.oci.tar", std::env::consts::ARCH);
    let archive = place.join(archive);
    tool::succeed(tar(&layout, &archive).args(["blobs", "index.json", "oci-layout"]))?;
    package::remove(&layout)?;
    Ok(archive)
}

/// A tar whose bytes depend on the files only.
fn tar(from: &Path, to: &Path) -> Command {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--mode=u=rwX,go=rX", "--format=gnu"]).arg(format!("--mtime=@{}", package::epoch()));
    tar.arg("--file").arg(to).arg("--directory").arg(from);
    tar
}

/// Compresses a layer. Returns the hash of its archive, and its descriptor.
fn layer(blobs: &Path, archive: &Path) -> Result<(String, Value), ToolError> {
    let id = format!("sha256:{}", sums::hash(archive)?.0);
    tool::succeed(Command::new("gzip").args(["--no-name", "--force"]).arg(archive))?;
    let mut packed = archive.as_os_str().to_owned();
    packed.push(".gz");
    Ok((id, add(blobs, LAYER, Path::new(&packed))?))
}

fn blob(blobs: &Path, kind: &str, value: &Value) -> Result<Value, ToolError> {
    let path = blobs.with_file_name("new.json");
    package::write(&path, &value.to_string())?;
    add(blobs, kind, &path)
}

/// Moves a file to the blobs. Returns its descriptor.
fn add(blobs: &Path, kind: &str, path: &Path) -> Result<Value, ToolError> {
    let (hash, size) = sums::hash(path)?;
    if size == 0 {
        return Err(wrong(&path.display().to_string(), "is empty"));
    }
    fs::rename(path, blobs.join(&hash)).map_err(at(path))?;
    Ok(json!({ "mediaType": kind, "digest": format!("sha256:{hash}"), "size": size }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(command: &str, place: &Path) -> String {
        let output = Command::new("sh").args(["-ec", command]).current_dir(place).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn value(path: &Path) -> Value {
        serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
    }

    fn image() -> (smc_test_support::TestDir, PathBuf) {
        let place = smc_test_support::TestDir::new();
        let base =
            "mkdir -p root/etc tree/bin && echo 12 >root/etc/version && echo run >tree/bin/smc";
        shell(&format!("{base} && chmod 755 tree/bin/smc && tar -C root -cf base.tar ."), &place);
        let path = write(&place.path("base.tar"), &place.path("tree"), &place);
        (place, path.unwrap())
    }

    #[test]
    fn every_blob_has_its_hash_and_the_layers_make_the_files() {
        let (place, archive) = image();
        let (place, name) = (&place, archive.file_name().unwrap().to_str().unwrap());
        shell(&format!("mkdir layout && tar -C layout -xf {name}"), place);
        shell(
            "cd layout/blobs/sha256 && for b in *; do echo \"$b  $b\"; done | sha256sum -c",
            place,
        );
        let blobs = place.join("layout/blobs/sha256");
        let of = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap().trim_start_matches("sha256:");
            let path = blobs.join(digest);
            assert_eq!(Some(fs::metadata(&path).unwrap().len()), descriptor["size"].as_u64());
            path
        };
        let index = value(&place.join("layout/index.json"));
        let manifest = value(&of(&index["manifests"][0]));
        let config = value(&of(&manifest["config"]));
        for (n, layer) in manifest["layers"].as_array().unwrap().iter().enumerate() {
            let hash = shell(&format!("gzip -dc {} | sha256sum", of(layer).display()), place);
            let id = config["rootfs"]["diff_ids"][n].as_str().unwrap();
            assert_eq!(id.trim_start_matches("sha256:"), hash.split(' ').next().unwrap());
            shell(&format!("mkdir -p all && tar -C all -xzf {}", of(layer).display()), place);
        }
        let made = shell("cat all/etc/version all/usr/local/vhost-device-ism/bin/smc", place);
        assert_eq!(made, "12\nrun\n");
    }

    #[test]
    fn the_same_files_make_the_same_image() {
        let (first, second) = (image(), image());
        // The root file system is the user's: it is taken as it is.
        fs::copy(first.0.path("base.tar"), second.0.path("base.tar")).unwrap();
        let again = write(&second.0.path("base.tar"), &second.0.path("tree"), &second.0);
        assert_eq!(sums::hash(&first.1).unwrap(), sums::hash(&again.unwrap()).unwrap());
    }

    #[test]
    fn a_root_file_system_that_is_no_archive_is_refused() {
        let place = smc_test_support::TestDir::new();
        fs::write(place.path("base.tar"), "<html>").unwrap();
        write(&place.path("base.tar"), &place, &place).unwrap_err();
    }
}
